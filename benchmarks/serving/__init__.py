"""The HTTP server under load, and the parts with which its clients are run."""
