"""`specdec inspect`: what the folder of a target or of a drafter holds and how it is read, without loading it."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from specdec.cli.flags import add_option_flags, not_empty
from specdec.cli.terminal.output import console
from specdec.cli.terminal.waiting import over
from specdec.options import EngineOptions

HELP = "what the folder of a target or of a draft head holds, and how it is read; loads no weights"
USED = ("draft_format", "draft_pickle")


def add_flags(parser: argparse.ArgumentParser) -> None:
    model = "folder or hub id of a target or of a draft head, a GGUF file, or mtp: the MTP layers in the folder of --target"
    parser.add_argument("model", metavar="MODEL", type=not_empty, help=model)
    target = "of a head or a small model that drafts: folder or hub id of its target, or a GGUF file, against which it is held"
    parser.add_argument("--target", type=not_empty, metavar="DIR", help=target)
    add_option_flags(parser, EngineOptions, [item.name for item in fields(EngineOptions) if item.name not in USED])
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def run(args: argparse.Namespace) -> int:
    from specdec.loading.about.inspect_head import print_facts

    facts = _facts(args)
    over()
    if args.json:
        import json

        print(json.dumps(facts, indent=1))
    else:
        print_facts(facts, console())
    return 0


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    """Of a head where a flag says that it is one, else of what the files are."""
    options = EngineOptions(draft_format=args.draft_format, draft_pickle=args.draft_pickle)  # refuses values that are none
    from specdec.draft.kind import SUFFIX
    from specdec.draft.kinds import kind_of
    from specdec.loading.about.inspect_head import head_facts
    from specdec.loading.about.inspect_target import is_head, target_facts
    from specdec.models.checkpoints.checkpoint import resolve_target

    is_said = args.target is not None or options != EngineOptions() or kind_of(args.model) or args.model == SUFFIX
    if is_said or is_head(resolve_target(args.model, "MODEL")):
        return head_facts(args.model, args.target, options)
    return target_facts(args.model)
