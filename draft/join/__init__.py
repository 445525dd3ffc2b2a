"""One tree from several sources: a drafter's tree, and paths that follow from the request's own text."""
