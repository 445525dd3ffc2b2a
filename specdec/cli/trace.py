"""`specdec trace`: generates, and shows what every round did: a page to look at, JSON to keep, or trees as text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.checks import read_some
from specdec.cli import flags
from specdec.cli.generate import read_prompt
from specdec.cli.terminal.output import check_files, note, write_files
from specdec.cli.terminal.waiting import over
from specdec.draft.kind import spelled
from specdec.files.whole import write_text_whole

if TYPE_CHECKING:
    from specdec.trace.trace import Trace

HELP = "draw what speculation did: every round's tree, and which branch was taken"
USUAL_PROMPTS = 8


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    prompt = "the text to go on from, or the FILE.json of an earlier trace; default: --prompts, or read from stdin"
    add("prompt", nargs="?", metavar="PROMPT", help=prompt)
    add("--out", type=flags.not_empty, metavar="FILE.html", help="write a page that needs no other file")
    add("--json", type=flags.not_empty, metavar="FILE.json", help="write the trace as data (docs/TRACE.md)")
    add("--text", action="store_true", help="print each round's tree; without --out and --json that is the default")
    add("--no-times", action="store_true", help="leave out the runs that measure phases")
    flags.add_prompt_flags(parser, num_prompts=f"{USUAL_PROMPTS} of --prompts")
    add("--spec", type=flags.tree_shape, action=flags.StoreOnce, metavar="S,k,nd", help=f"{flags.SPEC_HELP}; default: 5,4,16")
    flags.add_sampling_flags(parser)
    flags.add_grammar_flags(parser)
    flags.add_engine_flags(parser, "trace")


def run(args: argparse.Namespace) -> int:
    check_files({"--out": args.out, "--json": args.json})
    kept = Path(args.prompt) if args.prompt and args.prompt.endswith(".json") else None
    trace = _kept(args, kept) if kept is not None else _made(args)
    writers: dict[str | None, Any] = {args.out: trace.save_html}
    writers[args.json] = lambda path: write_text_whole(path, trace.as_json())
    write_files(writers)
    over()
    if args.text or not (args.out or args.json):
        _print(trace)
    for name in filter(None, (args.out, args.json)):
        note(f"wrote {name}, {Path(name).stat().st_size:,} bytes")
    return 0


def _kept(args: argparse.Namespace, path: Path) -> Trace:
    """An earlier trace.  ValueError for flags that could only have changed it while it was made."""
    changed = args.parser.changed(args, besides={"prompt", "out", "json", "text", "pace"})
    if changed:
        raise ValueError(f"{', '.join(changed)} would do nothing to the trace in {path}; leave it out")
    if args.out and Path(args.out).resolve() == path.resolve():
        raise ValueError(
            f"--out {args.out} would put the page in the trace's place; give it a name of its own, such as {path.stem}.html"
        )
    if not path.is_file():
        raise ValueError(f"PROMPT {str(path)!r} ends as the file of a trace does, and there is no such file")
    from specdec.trace.trace import Trace

    return Trace.from_json(read_some(path).decode("utf-8", "replace"), str(path))


def _made(args: argparse.Namespace) -> Trace:
    sampling = flags.sampling_of(args, seed=0)
    if sampling.n != 1:
        raise ValueError(f"--n must be 1 in a trace, which shows a text a prompt, got {sampling.n}")
    target, draft = flags.pair_of(args, ["--spec"] if args.spec else [])
    prompts = _prompts(args)
    options = flags.engine_of(args)
    from specdec import SpecDecoder  # through the door: see `without_collections`
    from specdec.bench.encode import with_seeds

    with SpecDecoder.from_pretrained(target, draft, args.spec, options=options) as decoder:
        trace = decoder.trace(prompts, with_seeds(sampling, len(prompts)), times=not args.no_times)
    named = {"target": str(target), "drafter": str(spelled(draft)) if draft is not None else ""}
    trace.about.update({name: value for name, value in named.items() if value})
    return trace


def _prompts(args: argparse.Namespace) -> list[Any]:
    if args.prompts is None:
        if args.num_prompts is not None:
            raise ValueError("--num-prompts would do nothing without --prompts; leave it out")
        prompt = read_prompt(args.prompt)
        return [[{"role": "user", "content": prompt}] if args.chat else prompt]
    if args.prompt is not None:
        raise ValueError("PROMPT and --prompts are two sources of prompts; give one of them")
    from specdec.bench.prompt_file import read_prompts

    listed: list[Any] = list(read_prompts(args.prompts, args.num_prompts)[: args.num_prompts or USUAL_PROMPTS])
    return [[{"role": "user", "content": each}] if args.chat and isinstance(each, str) else each for each in listed]


def _print(trace: Trace) -> None:
    from specdec.cli.terminal.screen import DRAFTED, OWN, PROMPT, has_colours, painted
    from specdec.trace.as_text import ASCII, BOXES, as_text

    colours = {"accepted": DRAFTED, "own": OWN, "rejected": PROMPT} if sys.stdout.isatty() and has_colours() else {}
    encoding = sys.stdout.encoding or "utf-8"
    try:
        "".join(BOXES).encode(encoding)
        lines = BOXES
    except UnicodeEncodeError:
        lines = ASCII
    for line in as_text(trace, lambda text, kind: painted(text, colours[kind]) if colours else text, lines):
        print(line.encode(encoding, "backslashreplace").decode(encoding))
