"""`specdec train`: trains a draft head for a target, as scripts/train_head does."""

from __future__ import annotations

import argparse

from specdec.cli.terminal.waiting import over
from specdec.train.__main__ import add_head_flags, run_head

HELP = "train a draft head for a target, on text that the target writes itself"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_head_flags(parser)


def run(args: argparse.Namespace) -> int:
    over()  # training says itself how far it is
    run_head(args)
    return 0
