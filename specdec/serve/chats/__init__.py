"""Chats over HTTP: messages and what their template is told, and answers that have parts.  Translates; knows no connection."""
