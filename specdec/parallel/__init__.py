"""Several ranks that hold one model together: who holds which share, and how they exchange what each has computed."""
