"""The `triton` attention backend: specdec's own kernels, and the choice of their tiles."""
