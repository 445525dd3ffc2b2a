"""The running batch as tensors: what the draft worker, the verifier and the runner all read."""
