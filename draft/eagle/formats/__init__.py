"""Readers of published head layouts, one file each, and what tells the layouts apart."""
