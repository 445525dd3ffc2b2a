"""What models write: sampling, grammars, drafts that are accepted, and whether texts are the same."""
