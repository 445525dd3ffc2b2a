"""What a tree is before it has tokens: its shape."""
