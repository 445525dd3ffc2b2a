"""Kernels of Mamba-2's rule: over a tree for each row, and over parts of prompts."""
