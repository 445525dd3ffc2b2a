"""Granite 4's hybrids: Mamba-2 layers beside attention, with multipliers, and mixtures or ordinary MLPs."""
