"""One training run of a head: what it learns from, and its steps."""
