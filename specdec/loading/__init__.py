"""Makes a ready engine from names and options: resolves the settings, loads both models, and builds what runs them."""
