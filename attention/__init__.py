"""Attention over paged keys and values: segments and plans, partial softmax states, caches, and the attention backends.

This package works on tensors only: it does not know draft trees, requests or draft heads.
"""
