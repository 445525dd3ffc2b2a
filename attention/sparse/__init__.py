"""Sparse attention: an indexer scores every key for every query, and attention reads the best ones only."""
