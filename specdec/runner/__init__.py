"""The device side of one rank (one process with one GPU): runs prompts and rounds, as CUDA graphs where there is a GPU."""
