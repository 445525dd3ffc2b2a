"""Heads of more than 256, and keys and values of two widths: the kernel for Hopper GPUs, and tiles."""
