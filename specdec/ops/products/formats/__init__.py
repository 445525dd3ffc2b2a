"""How weights that are not stored as dense values lie in memory, and which dense values they stand for."""
