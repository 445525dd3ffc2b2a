"""Latent attention (MLA) of one layer: dense, in 8 bits, sparse, and beside FlashMLA."""
