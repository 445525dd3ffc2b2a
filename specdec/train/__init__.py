"""Training of small targets and of draft heads, such as the pair that ships with specdec.  No runtime code imports it."""
