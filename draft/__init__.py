"""The draft side: one folder for each kind of drafter, and the growth of draft trees.

This package uses attention and does not know the verifier.
"""
