"""Keys and values of a sequence that several ranks divide among them (decode context parallelism)."""
