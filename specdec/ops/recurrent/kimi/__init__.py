"""Kimi's delta rule on a GPU: rounds (a tree for each row), and parts of prompts."""
