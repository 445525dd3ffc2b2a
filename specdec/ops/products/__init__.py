"""Matrix products, and the choice of the kernel for each shape, by which policy chooses that of other operations too."""
