"""Heads that draft several tokens in one pass: P-EAGLE, DFlash and DSpark."""
