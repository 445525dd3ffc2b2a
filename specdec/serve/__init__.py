"""An OpenAI-compatible HTTP server over one decoder.  Needs the extra `serve`; nothing is imported here."""
