"""BLOOM, MPT and Falcon, whose code in transformers computes attention without its attention interface."""
