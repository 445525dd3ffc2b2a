"""Attention as custom operators of torch: what a traced forward pass calls in place of an attention backend's kernels."""
