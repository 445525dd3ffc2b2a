"""Attention in plain torch: the `torch` attention backend, dense attention for training, and the definition that tests use."""
