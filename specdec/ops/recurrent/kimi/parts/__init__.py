"""Kernels of Kimi's delta rule over parts of prompts."""
