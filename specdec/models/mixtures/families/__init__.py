"""One short file a family: how its config.json is read, and what it calls its tensors."""
