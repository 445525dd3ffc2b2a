"""`specdec bench`: measures a pair against its own plain decoding, prints the report, then writes the files asked for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.cli import flags
from specdec.cli.terminal.output import check_files, console, json_writer, say_plain, write_files
from specdec.cli.terminal.waiting import over
from specdec.config import SpecConfig
from specdec.files.whole import write_whole
from specdec.screen.progress import Pace, show_progress

if TYPE_CHECKING:
    from specdec.bench.measurement import Measurement
    from specdec.bench.run import BenchOptions

HELP = "measure a pair against its own autoregressive decoding"
DEFAULT_SPECS = (SpecConfig(5, 4, 16), SpecConfig(5, 1, 6))


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shapes = " and ".join(s.label for s in DEFAULT_SPECS)
    flags.add_prompt_flags(parser, num_prompts="8, or as many as the largest batch")
    spec = f"{flags.SPEC_HELP}; may be given several times; default: {shapes}"
    add("--spec", type=flags.tree_shape, action="append", metavar="S,k,nd", help=spec)
    add("--batch-sizes", type=flags.ints, default=(1, 8), metavar="N,N", help="requests that run at once; default: 1,8")
    add("--repeats", type=int, default=3, metavar="N", help="timed passes a side; default: %(default)s")
    add("--profile", action="store_true", help="print where each millisecond of a round goes, beside the byte limit")
    forced = "force acceptance, one probability a level, for capacity planning; the numbers are marked SYNTHETIC"
    add("--synthetic-acceptance", type=flags.floats, metavar="P,P,..", help=forced)
    add("--details", action="store_true", help="print every table: phases, acceptance by depth, memory, what ran")
    add("--explain", action="store_true", help="print after the report what its words mean")
    add("--json", type=flags.not_empty, metavar="FILE", help="write raw counters, all times, settings and definitions")
    add("--plot", type=flags.not_empty, metavar="FILE.png", help="write a figure (needs matplotlib)")
    flags.add_sampling_flags(parser)
    flags.add_engine_flags(parser, "bench")


def run(args: argparse.Namespace) -> int:
    check_files({"--json": args.json, "--plot": args.plot})
    writers: dict[str | None, Callable[[Path], object]] = {args.json: json_writer(lambda: measurement.as_json())}
    if args.plot:
        from specdec.bench.show import plots

        plots.require(Path(args.plot))
        writers[args.plot] = lambda path: write_whole(path, plots.draw(measurement).savefig)
    measurement = _measure(options_of(args), args.pace)
    try:
        from specdec.bench.show.report import print_report

        print_report(measurement, console(), details=args.details, explain=args.explain)
    finally:  # printed first: a disk that is full loses no measurement; but files are written even if nobody reads the report
        write_files(writers)
    return 1 if measurement.diverged else 0


def options_of(args: argparse.Namespace) -> BenchOptions:
    from specdec import shipped
    from specdec.bench.prompt_file import read_prompts

    about_drafts = {"--spec": args.spec, "--synthetic-acceptance": args.synthetic_acceptance, "--plot": args.plot}
    target, draft = flags.pair_of(args, [flag for flag, value in about_drafts.items() if value])
    if draft is None:
        say_plain(target)
    sampling = flags.sampling_of(args, seed=0, least=2)
    source, engine = Path(args.prompts) if args.prompts else shipped.prompts_file(), flags.engine_of(args)
    prompts = read_prompts(source, args.num_prompts)
    from specdec.bench.run import BenchOptions

    return BenchOptions(
        target=target,
        draft=draft,
        prompts=prompts,
        num_prompts=args.num_prompts,
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


def _measure(options: BenchOptions, pace: Pace) -> Measurement:
    """Runs the benchmark, and says on stderr how far it is."""
    from specdec.bench.run import run_bench

    over()
    with show_progress("bench", "passes", pace=pace) as progress:
        return run_bench(options, progress)
