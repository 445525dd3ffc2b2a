"""The HTTP door in tests: a real server on loopback."""
