"""The flash-attn attention backends: three libraries behind one interface."""
