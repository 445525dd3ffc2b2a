"""Bamba: Mamba-2 layers beside attention of which half of each head is turned."""
