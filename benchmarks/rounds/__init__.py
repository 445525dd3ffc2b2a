"""Rounds, prompts and starts of large models' shapes with random weights, through the engine."""
