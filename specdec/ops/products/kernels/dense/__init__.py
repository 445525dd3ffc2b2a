"""Products with dense weights."""
