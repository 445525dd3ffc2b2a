"""`specdec bench`: measures a pair against its own plain decoding, prints the report, then writes the files asked for."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.cli.flags import (
    add_engine_flags,
    add_sampling_flags,
    engine_of,
    floats,
    ints,
    not_empty,
    pair_of,
    sampling_of,
    tree_shape,
)  # fmt: skip
from specdec.cli.output import check_files, console, write_files
from specdec.config import SpecConfig

if TYPE_CHECKING:
    from specdec.bench.measurement import Measurement
    from specdec.bench.run import BenchOptions

HELP = "measure a pair against its own autoregressive decoding"
DEFAULT_SPECS = (SpecConfig(5, 4, 16), SpecConfig(5, 1, 6))
DEFAULT_PROMPTS = 8
SECONDS_A_LINE = 10.0  # between lines of progress where stderr is no terminal


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shapes = " and ".join(s.label for s in DEFAULT_SPECS)
    lines = "text, one a line, or .jsonl (token_ids, prompt, text, question, task, turns)"
    add("--prompts", type=not_empty, metavar="FILE", help=lines)
    add("--num-prompts", type=int, metavar="N", help="the file's first N; default: the first 8, or all if there are fewer")
    add(
        "--spec",
        type=tree_shape,
        action="append",
        metavar="S,k,nd",
        help=f"tree shape, repeatable (S: or auto); default: {shapes}",
    )
    add("--batch-sizes", type=ints, default=(1, 8), metavar="N,N", help="default: 1,8")
    add("--max-tokens", type=int, default=64, metavar="N", help="output tokens of a prompt; default: %(default)s")
    add("--repeats", type=int, default=3, metavar="N", help="timed passes a side; default: %(default)s")
    add("--chat", action="store_true", help="apply the target's chat template to the prompts")
    add("--profile", action="store_true", help="print where each millisecond of a round goes, beside the byte limit")
    forced = "force acceptance, one probability a level, for capacity planning; the numbers are marked SYNTHETIC"
    add("--synthetic-acceptance", type=floats, metavar="P,P,..", help=forced)
    add("--json", type=not_empty, metavar="FILE", help="write raw counters, all times, settings and definitions")
    add("--plot", type=not_empty, metavar="FILE.png", help="write a figure (needs specdec[plots])")
    add_sampling_flags(parser)
    add_engine_flags(parser, "bench")


def run(args: argparse.Namespace) -> int:
    check_files({flag: path for flag, path in (("--json", args.json), ("--plot", args.plot)) if path})
    if args.plot:
        from specdec.bench import plots

        plots.require(Path(args.plot))
    measurement = _measure(_options(args))
    try:
        from specdec.bench.report import print_report

        print_report(measurement, console())
    finally:  # printed first: a disk that is full loses no measurement; but files are written even if nobody reads the report
        write_files(_writers(args, measurement))
    return 1 if measurement.diverged else 0


def _options(args: argparse.Namespace) -> BenchOptions:
    from specdec import shipped
    from specdec.bench.prompt_file import read_prompts

    flags = {"--spec": args.spec, "--synthetic-acceptance": args.synthetic_acceptance}
    target, draft = pair_of(args, [flag for flag, value in flags.items() if value])
    sampling = sampling_of(args)
    if sampling.temperature > 0 and sampling.seed is None:
        sampling = replace(sampling, seed=0)
    source, engine = Path(args.prompts) if args.prompts else shipped.prompts_file(), engine_of(args)
    prompts = read_prompts(source, args.num_prompts)
    from specdec.bench.run import BenchOptions

    return BenchOptions(
        target=target,
        draft=draft,
        prompts=prompts if args.num_prompts else prompts[:DEFAULT_PROMPTS],
        prompts_source=str(source),
        specs=tuple(args.spec or DEFAULT_SPECS) if draft is not None else (),
        batch_sizes=args.batch_sizes,
        sampling=sampling,
        repeats=args.repeats,
        chat=args.chat,
        engine=engine,
        profile=args.profile,
        synthetic_acceptance=args.synthetic_acceptance,
    )


def _writers(args: argparse.Namespace, measurement: Measurement) -> dict[str, Callable[[Path], object]]:
    """What writes each file that was asked for."""
    writers: dict[str, Callable[[Path], object]] = {}
    if args.json:
        writers[args.json] = lambda path: path.write_text(json.dumps(measurement.as_json(), indent=1) + "\n")
    if args.plot:
        from specdec.bench import plots

        writers[args.plot] = lambda path: plots.write_plot(measurement, path)
    return writers


def _measure(options: BenchOptions) -> Measurement:
    """Runs the benchmark under a bar on stderr, or under a line now and then where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from specdec.bench.run import run_bench

    on_stderr = console(stderr=True)
    if not on_stderr.is_terminal:
        return run_bench(options, _Lines())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=on_stderr, transient=True) as bar:
        task = bar.add_task("loading")
        return run_bench(options, lambda what, done, of: bar.update(task, description=what, completed=done, total=of))


class _Lines:
    """Says what runs, at most once in SECONDS_A_LINE, so that a log shows a long run to be alive and stays short."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, what: str, done: int, of: int) -> None:
        if time.monotonic() - self.last >= SECONDS_A_LINE:
            self.last = time.monotonic()
            print(f"specdec: {what}, {done} of {of} passes done", file=sys.stderr)
