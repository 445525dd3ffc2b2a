"""BLOOM, MPT and Falcon, whose code in transformers computes attention by itself."""
