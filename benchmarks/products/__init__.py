"""Products, experts and sums over ranks: tiles, weights in 8 and 4 bits, operators."""
