"""Targets with MTP layers, and what such layers compute by definition."""
