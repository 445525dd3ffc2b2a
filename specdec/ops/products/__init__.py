"""Matrix products, the kernel for each shape, and the policy that is asked about such choices everywhere."""
