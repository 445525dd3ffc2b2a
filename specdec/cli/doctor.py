"""`specdec doctor`: what this machine is, and what can run on it."""

from __future__ import annotations

import argparse

from specdec.cli.output import console

HELP = "what this machine is, and what can run on it"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", action="store_true", help="print what each attention backend can do, on any machine")


def run(args: argparse.Namespace) -> int:
    from specdec.loading.about.doctor import print_capabilities, run_doctor

    if args.table:
        print_capabilities()
    else:
        run_doctor(console())
    return 0
