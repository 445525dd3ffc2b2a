"""Gemma 4's text models: full layers with heads of their own, inputs by layer, shared keys and values, and mixtures."""
