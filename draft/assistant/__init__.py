"""Assistants: drafters whose layers have queries alone and read their target's own keys and values (Gemma 4's)."""
