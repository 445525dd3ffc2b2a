"""The benchmark: measures a decoder against itself without the draft, and says honestly what it found."""
