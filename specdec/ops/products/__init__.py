"""Matrix products: which kernel computes which shape."""
