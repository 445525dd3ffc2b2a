"""Answers of chats in their parts: thoughts, calls of tools and content.  Knows texts; no model and no tokenizer."""
