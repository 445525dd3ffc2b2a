"""How weights that are not stored as plain numbers lie in memory, and which numbers they stand for."""
