"""How a run of the suite is made: which cases it takes."""
