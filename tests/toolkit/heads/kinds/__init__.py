"""Draft heads and drafters of single kinds: made and computed by their definition."""
