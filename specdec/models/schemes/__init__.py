"""How weights of 8 or 4 bits are stored: in checkpoints, and in memory."""
