"""The HTTP door: an OpenAI-compatible server over one decoder.  Needs the extra `serve`; nothing is imported here."""
