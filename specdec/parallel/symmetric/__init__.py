"""Exchanges between GPUs that write into each other's memory: one kernel sums, adds and norms."""
