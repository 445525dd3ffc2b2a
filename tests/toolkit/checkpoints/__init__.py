"""What checkpoints hold beside weights in one piece: tokenizers, and experts in 4 bits."""
