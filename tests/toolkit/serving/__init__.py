"""The HTTP server in tests: a real server on loopback."""
