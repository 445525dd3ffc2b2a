"""The gated delta rule over parts of prompts on a GPU: see launch.py."""
