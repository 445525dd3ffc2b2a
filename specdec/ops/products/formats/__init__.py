"""How weights that are not dense lie in memory, and which dense values they stand for."""
