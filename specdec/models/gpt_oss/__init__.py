"""gpt-oss in its own checkpoints, whose experts are stored in mxfp4."""
