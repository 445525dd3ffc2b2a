"""What `scripts/train_target` runs: flags, then a call into `target`.  Knows no model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields


def build_parser() -> argparse.ArgumentParser:
    from specdec.train.target import TargetRun

    parser = argparse.ArgumentParser(prog="train_target", description="Train a small Llama-family target model on plain text.")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="UTF-8 text, plain, .xz or .gz")
    parser.add_argument("--extra-text", nargs="*", default=[], metavar="FILE", help="read in the early part only")
    parser.add_argument("--out", required=True, metavar="DIR", help="the finished model's folder")
    parser.add_argument("--checkpoint", metavar="FILE", help="default: DIR/checkpoint.pt")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers (worth it on a GPU)")
    parser.add_argument("--prompts", type=int, default=0, metavar="N", help="write N held-out openings")
    for field in fields(TargetRun):
        kind = float if isinstance(field.default, float) else int
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default, help="%(default)s")
    return parser


def main(argv: list[str] | None = None) -> int:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from specdec.train.target import TargetRun, train_target

    disable_progress_bar()  # one bar is enough
    args = build_parser().parse_args(argv)
    try:
        run = TargetRun(**{field.name: getattr(args, field.name) for field in fields(TargetRun)})
        done = train_target(
            run, args.text, args.out, extra=args.extra_text, checkpoint=args.checkpoint, resume=args.resume,
            device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"), compile_layers=args.compile,
            prompts=args.prompts,
        )  # fmt: skip
    except ValueError as error:
        print(f"train_target: {error}", file=sys.stderr)
        return 2
    print(f"best held-out loss {done.best_loss:.4f} at step {done.best_step}, {done.seconds:.0f} s -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
