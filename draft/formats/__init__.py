"""The form into which heads of all kinds are read, and what the readers of all layouts share."""
