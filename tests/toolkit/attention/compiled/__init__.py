"""Kernels of attention compiled for a Hopper GPU, on a machine that needs none."""
