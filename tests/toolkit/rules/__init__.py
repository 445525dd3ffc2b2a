"""Rules that tests/test_layout.py holds the source to, each a function from files to faults."""
