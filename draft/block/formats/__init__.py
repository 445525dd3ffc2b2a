"""Readers of the layouts in which heads of one pass are published, one file each, and what they share (common.py)."""
