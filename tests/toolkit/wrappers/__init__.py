"""Wrappers of texts and images for tests."""
