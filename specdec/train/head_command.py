"""What `scripts/train_head` runs: flags, then a call into `head`.  Knows no model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields


def build_parser() -> argparse.ArgumentParser:
    from specdec.train.head import HeadRun

    parser = argparse.ArgumentParser(prog="train_head", description="Train an EAGLE-3 head for a Llama-family target.")
    parser.add_argument("--target", required=True, metavar="DIR", help="the target's folder or hub id")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="UTF-8 text, plain, .xz or .gz")
    parser.add_argument("--out", required=True, metavar="DIR", help="the finished head's folder")
    parser.add_argument("--aux-layers", metavar="I,J,K", help="0-based target layers whose outputs are the features")
    parser.add_argument("--resume", action="store_true", help="go on from DIR's checkpoint and self-generated text")
    parser.add_argument("--device", default="auto", help="default: the GPU if there is one")
    for field in fields(HeadRun):
        kind = float if isinstance(field.default, float) else int
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default, help="%(default)s")
    return parser


def main(argv: list[str] | None = None) -> int:
    from specdec.train.head import HeadRun, train_head

    args = build_parser().parse_args(argv)
    try:
        layers = tuple(int(part) for part in args.aux_layers.split(",")) if args.aux_layers else None
        run = HeadRun(**{field.name: getattr(args, field.name) for field in fields(HeadRun)})
        train_head(run, args.target, args.text, args.out, aux_layers=layers, resume=args.resume, device=args.device)
    except ValueError as error:
        print(f"train_head: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
