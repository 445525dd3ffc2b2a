"""A decoder that compares some of its finished answers with its target once more, while no request is there."""
