"""The tables of other texts that a decoder's sources read: what fills them, and who may read what."""
