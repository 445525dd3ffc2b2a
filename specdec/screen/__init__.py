"""What is shown on a screen of any width, and while a long call runs.  Knows no model and nothing of what is shown."""
