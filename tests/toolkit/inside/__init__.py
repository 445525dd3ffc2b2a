"""Parts of the test driver that see the inside of an engine."""
