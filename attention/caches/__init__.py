"""Where keys and values are kept: 16 bit, 8 bit and latents, all as pages of slots."""
