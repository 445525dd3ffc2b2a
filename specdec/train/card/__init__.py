"""What a finished head is worth, and the card that says so."""
