"""Tables of other texts, for tests of the sources that read them."""
