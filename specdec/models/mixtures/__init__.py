"""Mixtures of experts: one frame for all families, of which each is a rule for its router and a form of its experts."""
