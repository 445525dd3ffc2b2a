"""The KV caches, addressed by slot: keys and values, latents, and an indexer's keys, in the model's own dtype or in 8 bits."""
