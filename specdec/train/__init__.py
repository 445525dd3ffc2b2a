"""Training of the small models that ship with specdec: text in, checkpoints out. No runtime code imports this."""
