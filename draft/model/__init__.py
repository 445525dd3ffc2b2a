"""A small language model as drafter: an ordinary causal model of the target's vocabulary, with keys and values of its own."""
