"""The flash-attn attention backends: three libraries with one interface."""
