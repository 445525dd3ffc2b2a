"""The n-gram drafter: it looks up how the text went on where its last tokens stood before.  It needs no checkpoint."""
