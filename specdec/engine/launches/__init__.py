"""What the scheduler plans: one launch for the runner after the other."""
