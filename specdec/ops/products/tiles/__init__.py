"""Which kernel a product takes, and with which tiles: chosen by shapes and the kind of GPU alone."""
