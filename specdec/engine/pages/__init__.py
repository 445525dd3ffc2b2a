"""Records who owns which page of the KV pool, and which pages are kept for later prompts.  This folder knows numbers only."""
