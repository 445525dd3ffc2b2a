"""Nemotron-H and Nemotron 3: layers of one block each, which is Mamba-2, attention, an MLP without a gate, or a mixture."""
