"""Targets of the DiffLlama family: a Llama with differential attention."""
