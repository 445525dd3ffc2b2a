"""Heads of every kind for one real target, of equal data and equal steps: prompts, texts, training, and the table."""
