"""The draft side: EAGLE heads, the worker that runs them step by step, and the growth of draft trees.

This package uses attention and does not know the verifier.
"""
