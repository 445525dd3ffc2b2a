"""Targets computed by the code in transformers, with our attention."""
