"""Products with quantised and lossless 12-bit weights, whose bits become numbers in registers."""
