"""The command line: `specdec generate`, `specdec bench`, `specdec serve`, `specdec doctor`.  Help waits for no torch."""

from specdec.cli.entry import build_parser, main

__all__ = ["build_parser", "main"]
