"""`specdec inspect`: what a draft head's folder holds and how it is read, without loading it."""

from __future__ import annotations

import argparse
from dataclasses import fields

from specdec.cli.flags import add_option_flags, not_empty
from specdec.cli.output import console
from specdec.options import EngineOptions

HELP = "what a draft head's folder holds, and how it is read; loads no weights"
USED = ("draft_format", "draft_pickle")


def add_flags(parser: argparse.ArgumentParser) -> None:
    head = "folder or hub id of the draft head, or mtp: the MTP layers in the folder of the target"
    parser.add_argument("head", metavar="HEAD", type=not_empty, help=head)
    target = "folder or hub id of its target, or a GGUF file, whose sizes the head is held against"
    parser.add_argument("--target", type=not_empty, metavar="DIR", help=target)
    add_option_flags(parser, EngineOptions, [item.name for item in fields(EngineOptions) if item.name not in USED])
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def run(args: argparse.Namespace) -> int:
    options = EngineOptions(draft_format=args.draft_format, draft_pickle=args.draft_pickle)  # refuses values that are none
    from specdec.draft.formats.open import HowToRead
    from specdec.draft.kinds import MTP, refuse_idle
    from specdec.loading.about.inspect_head import head_facts, mtp_facts, print_facts

    if args.head == MTP:
        refuse_idle(options, MTP)
        facts = mtp_facts(args.target)
    else:
        facts = head_facts(args.head, args.target, HowToRead(args.draft_format, args.draft_pickle))
    if args.json:
        import json

        print(json.dumps(facts, indent=1))
    else:
        print_facts(facts, console())
    return 0
