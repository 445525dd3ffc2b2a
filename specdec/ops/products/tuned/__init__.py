"""Tiles that were measured on the machine where specdec runs: the table of them, and where it is kept."""
