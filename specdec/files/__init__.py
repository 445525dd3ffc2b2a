"""Files that are whole or not there.  Knows nothing of what stands in them."""
