"""Heads that training makes: fresh ones, and the folders that trained ones are saved in."""
