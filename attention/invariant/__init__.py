"""Attention of which no result depends on what is computed beside it: positions alone fix the order of every sum."""
