"""Training of small targets and of EAGLE-3 heads, such as the pair that ships with specdec.  No runtime code imports it."""
