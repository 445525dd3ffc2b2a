"""A request's own prediction of its answer as a source of paths (OpenAI's `prediction`)."""
