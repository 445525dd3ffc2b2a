"""Mamba-2 as a layer that several families share: its keys of config.json, its module, and how that is filled."""
