"""What both models compute between attention and attention: pure functions, and the kernels that fuse them."""
