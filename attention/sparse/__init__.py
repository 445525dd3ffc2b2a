"""Sparse latent attention: an indexer scores every key of a request, and attention reads only the best of them."""
