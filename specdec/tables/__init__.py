"""Tables of other texts, of which drafts are made: the steps that bring them to a runner."""
