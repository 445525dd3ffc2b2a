"""Whether a decoder's text is its target's own: the reference, the near-tie check, and `specdec verify`."""
