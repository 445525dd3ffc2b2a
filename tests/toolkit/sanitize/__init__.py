"""Kernels under NVIDIA's compute-sanitizer: which tests launch them, what they launched, and what was found."""
