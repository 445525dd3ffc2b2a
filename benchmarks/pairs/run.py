"""Heads of every kind for one target, of equal data and steps: each step writes parts, and none is done twice.

    python benchmarks pairs.run prompts --folder runs/pairs --target SmolLM2.gguf
    python benchmarks pairs.run texts --folder runs/pairs --seconds 200
    python benchmarks pairs.run train eagle3 dflash --folder runs/pairs --seconds 400
    python benchmarks pairs.run eval --folder runs/pairs
    python benchmarks pairs.run table --folder runs/pairs

The steps, in their order: `prompts` makes requests of texts and writes the plan, with --set NAME=VALUE for its settings;
`texts` lets the target ask and answer; `train` trains the kinds that are named, or all, and KIND-long for the plan's
long_seconds; `eval` counts accept lengths, which needs no GPU; `verify` compares texts; `start` times starts; `bench` measures
speeds; `table` writes table.json and table.md of what is there; `card` writes a head with its card into --out.  `pack` writes
the folder into few files of --out; `unpack` reads them.

--seconds is what a call may take.  A step that has no time left ends, says what is missing, and goes on with the same command.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from pairs.plan import FILES, KINDS, LONG, PairsPlan, PartsFolder, TimeBudget
from pairs.requests import ABOUT, BOOKS

STEPS = ("prompts", "texts", "train", "eval", "verify", "start", "bench", "table", "card", "pack", "unpack")
Work = tuple[str, Callable[[], Any]]  # a part's name, and what measures it


def texts_work(folder: PartsFolder, plan: PairsPlan) -> Iterator[Work]:
    from pairs import training

    yield "texts-asked", partial(training.ask_target, folder, plan)
    yield "texts-rows", partial(training.write_texts, folder, plan)


def train_work(folder: PartsFolder, plan: PairsPlan, names: list[str], budget: TimeBudget) -> Iterator[Work]:
    from pairs import training

    for name in names:
        if name.endswith(LONG) and not plan.long_seconds:
            raise ValueError(f"{name}: expected a plan with long_seconds, got 0; nearest: `prompts` with --set long_seconds=N")
        yield f"train-{name}", partial(training.train_head, folder, plan, name, budget)


def pair_work(step: str, folder: PartsFolder, plan: PairsPlan, kinds: list[str], shapes: Sequence[str]) -> Iterator[Work]:
    """Of the heads that are trained; each is loaded when its first missing part is due."""
    from pairs import measuring

    for kind in kinds:
        if folder.part(f"train-{kind}") is None:
            print(f"{kind}: not trained yet")
            continue
        pair = cache(partial(measuring.MeasuredPair, folder, plan, kind))
        if step == "start":
            yield f"start-{kind}", partial(measuring.start_seconds, folder, plan, kind)
        elif step == "verify":
            yield f"verify-{kind}", lambda pair=pair: measuring.verdict(pair())
        for shape in shapes if step in ("eval", "bench") else ():
            if step == "eval":
                yield f"eval-{kind}-{shape}", lambda pair=pair, shape=shape: measuring.accept_lengths(pair(), shape)
                continue
            for batch in plan.batches:
                name, measure = f"bench-{kind}-{shape}-{batch}", measuring.speeds
                yield name, lambda pair=pair, of=(shape, batch), measure=measure: measure(pair(), *of)
        if pair.cache_info().currsize:
            pair().close()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says, or these arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("step", choices=STEPS)
    add("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    add("--shape", action="append", metavar="S,k,nd", help="of `eval` and `bench`: one of the plan's shapes; default: all")
    add("--folder", type=Path, required=True, help="where everything lies")
    add("--seconds", type=float, default=600.0, help="what this call may take; default: %(default)g")
    add("--target", help="of `prompts`: a folder or a GGUF file")
    add("--tiny", action="store_true", help="of `prompts`: settings with which all steps take a minute on a CPU")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="of `prompts`: a setting of the plan")
    add("--text", type=Path, default=Path("../shared/text"), help="of `prompts`: the folder of texts; default: %(default)s")
    add("--evaluation", type=Path, default=Path("../shared/prompts"), help="of `prompts`: files to measure with; %(default)s")
    add("--out", type=Path, help="of `card` and `pack`: a folder; of `unpack`: where the packed files lie")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.kinds if name.removesuffix(LONG) not in KINDS]:
        parser.error(f"argument KIND: expected some of {', '.join(KINDS)}, or one with {LONG}, got {', '.join(unknown)}")
    if args.step in ("card", "pack", "unpack") and args.out is None:
        parser.error(f"argument --out: {args.step} needs a folder")
    return args


def plan_of(args: argparse.Namespace) -> PairsPlan:
    from specdec import shipped

    if args.tiny:
        return PairsPlan.tiny(str(args.target or shipped.target_folder())).changed(args.set)
    if not args.target:
        raise ValueError("--target is missing: prompts are written for a target; nearest thing that works: --tiny")
    return PairsPlan(str(args.target)).changed(args.set)


def work_of(args: argparse.Namespace, folder: PartsFolder, budget: TimeBudget) -> Iterator[Work]:
    kinds = args.kinds or list(KINDS)
    if args.step == "texts":
        return texts_work(folder, folder.plan)
    if args.step == "train":
        return train_work(folder, folder.plan, kinds, budget)
    shapes = args.shape or folder.plan.shapes
    if unknown := set(shapes) - set(folder.plan.shapes):
        raise ValueError(f"--shape: expected some of {'; '.join(folder.plan.shapes)}, got {'; '.join(sorted(unknown))}")
    return pair_work(args.step, folder, folder.plan, kinds, shapes)


def main() -> int:
    return run_step(parse())


def check_folders(args: argparse.Namespace) -> None:
    """ValueError where a file lies in the place of a folder, or `prompts` can't use what it is given."""
    for name in ("folder", "out", "text", "evaluation"):
        path, is_read = getattr(args, name), name in ("text", "evaluation")
        if path is None or (is_read and args.step != "prompts"):
            continue
        if (is_read and not path.exists()) or not next(each for each in (path, *path.parents) if each.exists()).is_dir():
            raise ValueError(f"--{name}: expected a folder{'' if is_read else ', or none yet'}, got {path}")
    if args.step == "prompts":
        check_sources(args)


def check_sources(args: argparse.Namespace) -> None:
    """ValueError where `prompts` lacks files, or a target is a file of another kind; an absent one may lie elsewhere."""
    from specdec.models.gguf.file import is_gguf

    for flag, folder, files in (
        ("text", args.text, [*ABOUT.values(), BOOKS]),
        ("evaluation", args.evaluation, [f"{name}.jsonl" for name in FILES]),
    ):
        if lacking := [name for name in files if not (folder / name).is_file()]:
            raise ValueError(f"--{flag}: expected a folder with {', '.join(lacking)}, got {folder}")
    if args.target and (target := Path(args.target)).is_file() and not is_gguf(target):
        raise ValueError(f"--target: expected a folder or a GGUF file, got {target}")


def run_step(args: argparse.Namespace) -> int:
    """The exit code of the step."""
    check_folders(args)
    folder = PartsFolder(args.folder)
    if args.step == "prompts":
        from pairs.training import write_prompts

        write_prompts(folder, plan_of(args), args.text, args.evaluation)
    elif args.step == "table":
        from pairs.table import write_table

        write_table(folder)
    elif args.step == "card":
        from pairs.card import write_head

        for kind in args.kinds or list(KINDS)[:1]:
            write_head(folder, kind, args.out)
    elif args.step in ("pack", "unpack"):
        from pairs import packing

        (packing.pack if args.step == "pack" else packing.unpack)(args.folder, args.out)
    else:
        return run_parts(args, folder)
    return 0


def _where(plan: PairsPlan) -> str:
    """The machine that measures, and the day."""
    from specdec.loading.about.machine import machine_facts, versions

    facts = machine_facts()
    device = facts["gpus"][0]["name"] if facts["gpus"] and plan.device != "cpu" else facts["cpu"]
    return f"{device}, torch {versions()['torch']}, {datetime.now(UTC).date().isoformat()}"


def run_parts(args: argparse.Namespace, folder: PartsFolder) -> int:
    """Runs what is missing of a step.  One that fails is named at the end, and takes no other with it."""
    budget, late, failed = TimeBudget(args.seconds, _where(folder.plan)), list[str](), list[str]()
    for name, measure in work_of(args, folder, budget):
        try:
            if not budget.run(folder, name, measure):
                late.append(name)
        except Exception:  # of any kind: the time on a GPU is not lost to one head
            traceback.print_exc()
            failed.append(name)
    told = {"no time for": late, "FAILED": failed}
    print("; ".join([f"{args.step}: done", *(f"{what} {', '.join(names)}" for what, names in told.items() if names)]))
    return 1 if failed else 0
