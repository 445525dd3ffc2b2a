"""Targets whose kinds of layers have heads of their own."""
