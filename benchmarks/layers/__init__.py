"""Attention of one layer: paged, of several kinds, and where ranks divide sequences."""
