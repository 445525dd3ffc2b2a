"""Device side of one rank: runs prompts and rounds, as CUDA graphs where there is a GPU."""
