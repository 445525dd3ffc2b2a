"""Products of mixtures of experts whose weights are stored in 8 or 4 bits."""
