"""The `triton` backend: our own kernels, and what decides their tiles."""
