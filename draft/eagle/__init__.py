"""EAGLE heads: what they compute, how they are read from a folder, and the worker that grows trees with them."""
