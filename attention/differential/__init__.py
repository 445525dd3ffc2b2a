"""Differential attention (arXiv 2410.05258): one softmax is subtracted from another, over the same values."""
