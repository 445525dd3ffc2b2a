"""Attention in plain torch: the oracle of the tests, and the `torch` backend."""
