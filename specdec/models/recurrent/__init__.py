"""Recurrent layers of a target: sizes, the pool of their states, and how a pass meets both attention and states."""
