"""Anthropic's /v1/messages, without a memory: each request brings all of its history, and is answered as a chat."""
