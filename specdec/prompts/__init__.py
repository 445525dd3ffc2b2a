"""What a prompt may be, and how it becomes token ids."""
