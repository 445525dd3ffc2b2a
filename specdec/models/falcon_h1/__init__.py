"""Falcon-H1: attention and Mamba-2 side by side in every layer, with multipliers."""
