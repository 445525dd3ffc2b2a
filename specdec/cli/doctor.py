"""`specdec doctor`: what this machine runs, and the one thing to do next; with --details, all that can be told of it."""

from __future__ import annotations

import argparse

from specdec.cli.terminal.output import console

HELP = "what this machine runs, and what to do next"


def add_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    details = "print all of it: versions, every setting's default here, backends, drafters, formats of weights"
    what.add_argument("--details", action="store_true", help=details)
    what.add_argument("--table", action="store_true", help="print what each attention backend can do, on any machine")


def run(args: argparse.Namespace) -> int:
    from specdec.loading.about.machine import package_versions
    from specdec.loading.about.verdict import broken

    if first := next(broken(package_versions()), None):  # what follows imports these packages, and may fail with them
        print(f"{first.runs}\nNext: {first.next}")
        return 0
    from specdec.loading.about.attention_table import table_as_markdown
    from specdec.loading.about.doctor import print_details
    from specdec.loading.about.screen import print_screen

    if args.table:
        print(table_as_markdown())
    else:
        (print_details if args.details else print_screen)(console)
    return 0
