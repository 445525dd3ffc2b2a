"""What rows with grammars add to a batch: masks of their tokens, and where texts stand that wait for their grammars."""
