"""Requests that arrive, are cancelled and fail at random, and what they must write all the same."""
