"""The command line of training: `python -m specdec.train head` and `target`, or scripts/train_head and scripts/train_target.

Each setting of a run is a flag with the setting's default.  torch is imported only after all flags are known to be right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from specdec.train.settings import HeadRun, TargetRun, meaning_of, refuse_of_others

Run = TypeVar("Run", HeadRun, TargetRun)
SPLITS = ("auto", "gaps", "paragraphs", "lines", "stories", "file")
TEXT = "files of UTF-8 text or .jsonl, plain or packed as .xz or .gz"
SPLIT = (
    "where documents end in text without <|endoftext|>: at two or more empty lines (gaps), at empty lines (paragraphs), at "
    "each line, before what opens a story, or with the file; default: gaps if there are any, else paragraphs"
)

THREADS = "threads on a CPU; default: as many as torch takes by itself, since a training step has work for all of them"
AUX_LAYERS = "target layers, counted from 0, whose outputs are the head's features; default: 1, N//2 - 1, N - 4 of N layers"


class TrainParser(argparse.ArgumentParser):
    """argparse, but what is wrong is one line, and a flag must be spelled out: another one may begin alike tomorrow."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def build_parser() -> argparse.ArgumentParser:
    """The parser of both commands.  Parsed flags hold `run`, the function that executes the command, and `prog`, its name."""
    parser = TrainParser(prog="python -m specdec.train", description="Train small models for specdec.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "Train a draft head for a target, on text that the target writes itself."
    head = commands.add_parser("head", prog="train_head", help="a draft head for a target", description=about)
    add_head_flags(head)
    head.set_defaults(run=run_head, prog=head.prog)
    about = "Train a small Llama-family target model on plain text."
    target = commands.add_parser("target", prog="train_target", help="a small Llama-family target", description=about)
    _target_flags(target)
    target.set_defaults(run=_target, prog=target.prog)
    return parser


def add_head_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, metavar="DIR", help="the target's folder, hub id or GGUF file")
    add("--text", nargs="+", required=True, metavar="FILE", help=f"what prompts are made of: {TEXT}, texts or chats")
    add("--eval-text", nargs="+", default=[], metavar="FILE", help="more held-out text, to measure the finished head with")
    add("--out", required=True, metavar="DIR", help="the finished head's folder")
    add("--aux-layers", type=_layers, metavar="I,J,K", help=AUX_LAYERS)
    add("--self-text", metavar="FILE", help="what the target wrote, read if it is there; default: DIR/self_text.pt")
    add("--checkpoint", metavar="FILE", help="where the run saves itself; default: DIR/checkpoint.pt")
    add("--resume", action="store_true", help="go on from the checkpoint and the self-written text")
    _text_flags(parser)
    add("--device", default="auto", help="where it trains; default: the GPU if there is one")
    add("--threads", type=int, metavar="N", help=THREADS)
    _setting_flags(parser, HeadRun)


def _target_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", nargs="+", required=True, metavar="FILE", help=TEXT)
    add("--extra-text", nargs="*", default=[], metavar="FILE", help="more text, read in the early part of the run only")
    add("--out", required=True, metavar="DIR", help="the finished model's folder")
    add("--checkpoint", metavar="FILE", help="where the run saves itself; default: DIR/checkpoint.pt")
    add("--resume", action="store_true", help="go on from the checkpoint")
    _text_flags(parser)
    add("--device", help="where it trains; default: cuda where there is one, else cpu")
    add("--threads", type=int, metavar="N", help=THREADS)
    add("--compile", action="store_true", help="compile the layers with torch.compile, which is worth it on a GPU")
    add("--prompts", type=int, default=0, metavar="N", help="write N held-out openings, as prompts for specdec bench")
    _setting_flags(parser, TargetRun)


def _text_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--split", choices=list(SPLITS), default="auto", help=SPLIT)
    parser.add_argument("--overwrite", action="store_true", help="replace the model or the run that DIR holds")


def _setting_flags(parser: argparse.ArgumentParser, run: type[HeadRun] | type[TargetRun]) -> None:
    for field in fields(run):
        flag, about = "--" + field.name.replace("_", "-"), f"{meaning_of(field)}; default: {field.default}"
        if choices := field.metadata["choices"]:
            parser.add_argument(flag, choices=choices, help=about)
            continue
        kind, metavar = (float, "X") if isinstance(field.default, float) else (int, "N")
        read = _rows if field.name == "texts" else kind
        parser.add_argument(flag, type=read, metavar=metavar, help=about)


def _rows(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected how many rows the target writes, got {text[:80]!r}; files of text are named by --text"
        ) from None


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected layer numbers like 1,13,24, got {text!r}") from None


def _settings(args: argparse.Namespace, run: type[Run]) -> Run:
    given = {field.name: value for field in fields(run) if (value := getattr(args, field.name)) is not None}
    if run is HeadRun:  # which can't tell a default from the same number, given for a kind that does not have it
        refuse_of_others(given.get("kind", HeadRun.kind), given)
    return run(**given)


@contextmanager
def fast_products() -> Iterator[None]:
    """Products of float32 matrices on tensor cores, in TF32, as training has them; on a CPU nothing changes."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def run_head(args: argparse.Namespace) -> None:
    run = _settings(args, HeadRun)

    from specdec.train.head import train_head

    train_head(
        run, args.target, args.text, args.out, eval_texts=args.eval_text, self_text=args.self_text, checkpoint=args.checkpoint,
        split=args.split, aux_layers=args.aux_layers, resume=args.resume, overwrite=args.overwrite, device=args.device,
        threads=args.threads, around_steps=fast_products,
    )  # fmt: skip


def _target(args: argparse.Namespace) -> None:
    run = _settings(args, TargetRun)

    import torch
    from transformers.utils.logging import disable_progress_bar

    from specdec.train.target import train_target

    disable_progress_bar()  # the training loop draws its own
    torch.manual_seed(run.seed)  # transformers' first weights, and dropout, are drawn from the process's generator
    done = train_target(
        run, args.text, args.out, extra=args.extra_text, checkpoint=args.checkpoint, resume=args.resume,
        device="auto" if args.device is None else args.device, compile_layers=args.compile,
        prompts=args.prompts, threads=args.threads, split=args.split, overwrite=args.overwrite,
    )  # fmt: skip
    print(f"best held-out loss {done.best_loss:.4f} at step {done.best_step}, {done.seconds:.0f} s -> {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.  The exit status is 0, 2 for wrong flags, settings or files, or 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except KeyboardInterrupt:
        print(f"{args.prog}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError) as error:
        print(f"{args.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
