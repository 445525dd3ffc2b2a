"""The KV caches, addressed by slot: 16-bit keys and values, 8-bit keys and values, and latents."""
