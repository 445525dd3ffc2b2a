"""Kimi Linear: layers of Kimi's delta rule beside latent attention without positions, before mixtures of experts."""
