"""What targets and draft heads compute between attention calls: pure functions, and the kernels that fuse them."""
