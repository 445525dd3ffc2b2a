"""Heads of one pass at work on a batch: the pass, what is kept of rows, and the trees that are made of it."""
