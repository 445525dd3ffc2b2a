"""From arguments to an exit code: finds the command, runs it, and turns what went wrong into one line on stderr.

Knows no command's flags and imports nothing heavy: every command does that when it runs.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

from specdec import __version__
from specdec.cli import bench, doctor, generate, interrupted, plan, serve, trace, tune, verify
from specdec.cli.flags import FlagParser, engine_of
from specdec.cli.heads import eval_head, inspect, train
from specdec.cli.terminal.output import complain
from specdec.cli.terminal.waiting import told_if_slow
from specdec.screen.progress import PACE, Pace

EPILOG = """exit codes:
  0    done
  1    bench, verify: outputs of the two sides differ beyond near-ties or are empty, or a part of the run failed;
       plan: it does not fit
  2    something that was given is wrong, or the run failed; one line on stderr says what
  130  interrupted by Ctrl-C; 143: serve, by SIGTERM before it was ready, or by a second one
  141  whoever read the output stopped reading (specdec bench | head)

SPECDEC_DEBUG=1 in the environment shows the traceback of an error."""
BROKEN_PIPE = 141
COMMANDS = (
    ("bench", bench), ("verify", verify), ("generate", generate), ("serve", serve), ("inspect", inspect), ("plan", plan),
    ("trace", trace), ("train", train), ("eval-head", eval_head), ("tune", tune), ("doctor", doctor),
)  # fmt: skip


def main(argv: Sequence[str] | None = None, pace: Pace | None = None) -> int:
    """Runs one command; returns the exit code.  pace: of what it says on stderr while one waits for it."""
    if sys.stderr is None:  # closed by whoever started this; print would write its messages to stdout instead
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if sys.stdout is None:
        complain("stdout is closed, so that nobody could read the output; nearest thing that works: >/dev/null")
        return 2
    args = build_parser().parse_args(argv, argparse.Namespace(pace=pace or PACE))
    with getattr(args, "around", nullcontext)():  # what a command does to the process, until the last word is written
        return run(args)


def run(args: argparse.Namespace) -> int:
    """Runs the command.  Whatever goes wrong is one line on stderr, and an exit code."""
    show = warnings.showwarning
    warnings.showwarning = lambda message, *_where, **_line: complain(str(message), "warning")  # without a line of code
    try:
        if getattr(args, "tensor_parallel_size", 1) > 1 and os.environ.get("RANK"):  # as launchers such as torchrun say
            from specdec.loading.ranks import serve_first_rank

            serve_first_rank(engine_of(args))  # before a command takes ports, files or stdin, which are the first rank's
        with told_if_slow(args.command, args.pace):
            code = args.run(args)
        sys.stdout.flush()  # a reader that went away is noticed here, not by a traceback when Python exits
        return code
    except KeyboardInterrupt as end:
        return interrupted(end)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if os.environ.get("SPECDEC_DEBUG"):
            raise
        where = error.filename or ("the output" if error.errno == errno.ENOSPC else "")  # a full disk names no file of its own
        complain(f"{error.strerror}: {where}" if where and error.strerror else str(error))
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: a request that failed while it ran
        if os.environ.get("SPECDEC_DEBUG"):
            raise
        complain(str(error))
    finally:
        warnings.showwarning = show
    return 2


def build_parser() -> FlagParser:
    parser = FlagParser(
        prog="specdec", description="Speculative decoding with draft heads, MTP layers or n-grams.", epilog=EPILOG
    )
    parser.add_argument("--version", action="version", version=f"specdec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS:
        added = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_flags(added)
        added.set_defaults(run=command.run, parser=added, command=name)
    return parser
