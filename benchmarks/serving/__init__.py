"""The HTTP door under load, and the parts with which its clients are run."""
