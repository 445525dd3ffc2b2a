"""Reading checkpoints strictly: every key and tensor is used, or is an error."""
