"""Kernels of rounds: the gated delta rule over a tree for each row."""
