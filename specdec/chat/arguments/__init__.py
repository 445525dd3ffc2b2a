"""Arguments of calls that are no JSON: which values are written as they are, and how they are read."""
