"""Heads of more than 256, and keys and values of two widths: the kernels for Hopper GPUs, and tiles."""
