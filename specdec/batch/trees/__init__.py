"""What a pass over trees reads and writes, by row and by node: slots, positions, recurrent states.  It knows no model."""
