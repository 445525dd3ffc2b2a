"""Texts that must obey a JSON schema, a regular expression or a grammar: which tokens may come next.  Knows no model."""
