"""The flash-attn backends: three libraries, one interface."""
