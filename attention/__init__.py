"""Attention over paged KV: segments, builders, states, caches and the backends that run them.

Knows tensors only: no trees, no requests, no EAGLE.
"""
