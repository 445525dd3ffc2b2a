"""What a head drafts along texts that are known, and how much of it the target accepts, counted without serving anything."""
