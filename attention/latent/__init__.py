"""Attention over latents (MLA, arXiv 2405.04434): its definition, its paged form, and the kernels."""
