"""EAGLE heads with every option: made, computed by their definition, and written in each published layout."""
