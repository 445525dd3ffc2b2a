"""The kernels of products, by what their weights are."""
