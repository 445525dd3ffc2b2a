"""Products with quantised and lossless 12-bit weights, whose bits become dense values in registers."""
