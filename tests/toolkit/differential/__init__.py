"""DiffLlama targets with options, and what they compute by definition."""
