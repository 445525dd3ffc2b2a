"""Matrix products, and the choice of the kernel for each shape."""
