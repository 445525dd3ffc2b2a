"""Readers of the layouts in which EAGLE heads are published, one file each."""
