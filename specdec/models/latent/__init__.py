"""Latent attention (MLA) of targets and of draft heads, whichever family's: sizes, layers, and how checkpoints store them."""
