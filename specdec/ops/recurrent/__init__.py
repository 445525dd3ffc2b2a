"""What recurrent layers compute from states of the committed text: over draft trees, over parts of prompts, over whole rows."""
