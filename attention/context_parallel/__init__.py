"""Decode context parallelism: several ranks share the keys and values of each sequence, token by token."""
