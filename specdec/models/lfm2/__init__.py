"""LFM2 and LFM2-MoE: gated short convolutions beside ordinary attention."""
