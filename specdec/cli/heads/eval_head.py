"""`specdec eval-head`: how many tokens of a draft head its target accepts, counted along texts without serving them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.bench import DEFAULT_SPECS
from specdec.cli.flags import add_option_flags, add_prompt_flags, not_empty, tree_shape
from specdec.cli.terminal.output import check_files, console, json_writer, write_files
from specdec.cli.terminal.waiting import over
from specdec.config import SamplingParams, SpecConfig
from specdec.options import EngineOptions

if TYPE_CHECKING:
    from specdec.generation import Stats

HELP = "count offline how many tokens of a draft head its target accepts"
USED = ("device", "dtype", "max_batch_size", "draft_format", "draft_pickle", "draft_quantize")
MIN_TOKENS = 2  # of an output in which a round runs


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("head", metavar="HEAD", type=not_empty, help="folder or hub id of the draft head")
    add("--target", type=not_empty, metavar="DIR", required=True, help="folder or hub id of its target, or a GGUF file")
    text = "held-out text, whose documents open the texts that the target writes, as specdec train takes it; not with --prompts"
    add("--eval-text", type=not_empty, nargs="+", default=[], metavar="FILE", help=text)
    add("--longest-prompt", type=int, metavar="N", help="of --eval-text: a prompt is a document's first N tokens; default: 48")
    add_prompt_flags(parser, num_prompts="all")
    shapes = " and ".join(spec.label for spec in DEFAULT_SPECS)
    spec = (
        f"shape of the draft tree: levels, branches, nodes; nd may be left out; may be given more than once; default: {shapes}"
    )
    add("--spec", type=tree_shape, action="append", metavar="S,k,nd", help=spec)
    add("--json", type=not_empty, metavar="FILE", help="write raw counters")
    add_option_flags(parser, EngineOptions, [item.name for item in fields(EngineOptions) if item.name not in USED])


def run(args: argparse.Namespace) -> int:
    check_files({"--json": args.json})
    options = EngineOptions(**{name: getattr(args, name) for name in USED})
    if args.max_tokens < MIN_TOKENS:
        raise ValueError(
            f"--max-tokens must be >= {MIN_TOKENS}, since the first token comes from the prefill and no round would run, got "
            f"{args.max_tokens}; nearest setting that works: --max-tokens {MIN_TOKENS}"
        )
    SamplingParams(max_tokens=args.max_tokens)  # refuses numbers that are too large
    specs = tuple(args.spec or DEFAULT_SPECS)
    if twice := [spec.label for spec in dict.fromkeys(specs) if specs.count(spec) > 1]:
        raise ValueError(f"--spec must name each shape once, got {', '.join(twice)} more than once")
    from specdec.screen.progress import show_progress
    from specdec.train.offline.run import check_head, eval_head

    check_head(args.head, args.target, specs, options)
    prompts = _prompts(args, options, more=max(spec.max_steps for spec in specs) + 1)
    over()
    with show_progress("eval-head", "texts") as progress:
        progress("the target writes", 0, len(prompts))
        found = eval_head(
            args.head, args.target, prompts, specs, args.max_tokens, options,
            lambda done: progress("the head drafts", done, len(prompts)),
        )  # fmt: skip
    _print(specs, found)
    write_files({args.json: json_writer(lambda: _record(args, specs, found, len(prompts)))})
    return 0


def _prompts(args: argparse.Namespace, options: EngineOptions, more: int) -> list[list[int]]:
    """The ids of the prompts.  more: tokens that are written after max_tokens."""
    from specdec import shipped
    from specdec.bench.encode import encode_prompts
    from specdec.bench.prompt_file import read_prompts
    from specdec.models.checkpoints.checkpoint import resolve_target
    from specdec.models.registry import choose_target
    from specdec.prompts.tokenizer import Tokenizer

    if args.longest_prompt is not None and not args.eval_text:
        raise ValueError("--longest-prompt would do nothing without --eval-text: prompts of a file are taken whole")
    folder = resolve_target(args.target, "--target")
    tokenizer, one = Tokenizer(folder), SamplingParams(max_tokens=1)
    if args.eval_text:
        if args.prompts or args.chat:
            raise ValueError(f"--eval-text and {'--prompts' if args.prompts else '--chat'} were given; expected one of the two")
        from specdec.train.text.openings import openings_of

        longest = 48 if args.longest_prompt is None else args.longest_prompt
        prompts = openings_of(tokenizer, args.eval_text, longest, args.num_prompts)
    else:
        source = Path(args.prompts) if args.prompts else shipped.prompts_file()
        listed = read_prompts(source, args.num_prompts)[: args.num_prompts]
        prompts = encode_prompts(listed, str(source), args.target, tokenizer, one, options, chat=args.chat)
    _check_room(args, choose_target(folder).config.max_position, max(map(len, prompts)), more)
    return prompts


def _check_room(args: argparse.Namespace, reads: int, longest: int, more: int) -> None:
    """ValueError if the output of the longest prompt is longer than what the target reads.  more: see _prompts."""
    most = reads - more - longest
    if most < MIN_TOKENS:
        room = reads - more - MIN_TOKENS
        nearest = f"--longest-prompt {room}" if args.eval_text else f"--prompts with no prompt of more than {room} tokens"
        raise ValueError(
            f"a prompt of {longest} tokens leaves no room for an output and {more} tokens after it: the target reads {reads} "
            f"tokens; nearest thing that works: {nearest}"
        )
    if args.max_tokens > most:
        raise ValueError(
            f"--max-tokens must be at most {most}, which leaves room for the longest prompt and {more} tokens after the end, "
            f"got {args.max_tokens}; nearest setting that works: --max-tokens {most}"
        )


def _print(specs: tuple[SpecConfig, ...], found: list[Stats]) -> None:
    from specdec.screen.grid import Grid

    grid = Grid(("S,k,nd",), "accept\nlength", "accepted of those reached, by level", "rounds")
    for spec, stats in zip(specs, found, strict=True):
        by_level = " ".join(f"{share:.2f}" for share in stats.acceptance_by_depth)
        grid.add(spec.label, f"{stats.accept_length:.3f}", by_level, str(stats.rounds))
    grid.print(console())


def _record(args: argparse.Namespace, specs: tuple[SpecConfig, ...], found: list[Stats], prompts: int) -> dict[str, Any]:
    derived = ("accept_length", "acceptance_by_depth")
    rows = [
        {"spec": spec.label, **{name: getattr(stats, name) for name in derived}, **vars(stats)}
        for spec, stats in zip(specs, found, strict=True)
    ]
    return {"head": args.head, "target": args.target, "prompts": prompts, "max_tokens": args.max_tokens, "rows": rows}
