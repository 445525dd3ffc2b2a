"""Attention of encoder-decoder models: an encoder's own, in both directions, and a decoder's to what the encoder has read."""
