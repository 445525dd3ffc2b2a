"""The playground at /: a page that uses the public API alone."""
