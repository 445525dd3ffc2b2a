"""DFlash2 heads: a DFlash head whose sublayers are wrapped in convolutions over its block, and which chooses among candidates."""
