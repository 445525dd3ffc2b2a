"""The text that training reads: files, documents, what is held out, and rows of tokens."""
