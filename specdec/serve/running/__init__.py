"""Runs what a plan asks for: its requests on the engine, and its answer, whole or as a stream."""
