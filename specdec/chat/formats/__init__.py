"""How each family of models writes calls of tools: a file for a family, and a table of them."""
