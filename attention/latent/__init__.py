"""Attention over latents (MLA): the pure functions and their kernels."""
