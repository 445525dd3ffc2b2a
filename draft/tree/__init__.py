"""Growing and choosing draft trees: candidates, branches, the best nodes.  Knows tensors, no kind of drafter."""
