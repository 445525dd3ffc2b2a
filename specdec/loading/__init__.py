"""From names and options to a ready engine: resolves settings, loads both models, builds what runs them."""
