"""The command line: `specdec generate`, `specdec bench`, `specdec serve`, `specdec doctor`.  Help waits for no torch.

This file knows no command.  It is what runs first, so that Ctrl-C while the commands are imported is no traceback either.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    try:
        from specdec.cli.entry import main as run_command

        return run_command(argv)
    except KeyboardInterrupt as end:
        return interrupted(end)


def interrupted(end: KeyboardInterrupt) -> int:
    """Says what ended the command; gives the exit code."""
    by = end.args[0] if end.args and isinstance(end.args[0], signal.Signals) else signal.SIGINT
    # `specdec serve` takes SIGTERM for one, too
    print("specdec: interrupted" if by == signal.SIGINT else f"specdec: ended by {by.name}", file=sys.stderr)
    return 128 + by
