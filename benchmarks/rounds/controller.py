"""SpecConfig("auto") against plain decoding and against fixed shapes, where acceptance is forced: the 8B shape, random weights.

    python benchmarks rounds.controller --out benchmarks/rounds/results/controller.json
    python benchmarks rounds.controller --batches 1,32 --taus 1,3

Each level of a tree is accepted with one probability, given that the level above it was.  An accept length of 3 means the
probability at which a chain of 7 levels would emit 3 tokens a round; 1 means that no draft is ever right.  Only the best path
of a tree can be accepted, so a tree gains nothing over a chain of its depth, and has to be told from it by its cost.

A sweep measures all fixed shapes first.  Then, for each accept length, "auto" gets some rounds in which it may settle, and runs
of "auto", of the fixed shapes that the sweep promises most of, and of plain decoding take turns.  All are in one decoder, begin
with the same prompts, are timed alike, and take about as long, so that texts are as long and the GPU is as warm.  A controller
sees no rounds of fixed shapes.  Rates are tokens that the rounds emit by expectation over seconds, looks at other shapes
included: by count, luck would be as large as what is to be seen.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import triton
from engine_internals import clear_caches, fixed_shape, set_acceptance, time_captures, timed_rounds, without_prefill

from rounds.round_8b import make_decoder, random_pair, random_prompts
from specdec.bench.profile import Workload
from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.session import Session

TAU_LEVELS = 7  # of the chain whose accept length names a line
AUTO = SpecConfig("auto", 4, 16)
CONTEXT = 1024
MAX_TOKENS = 900
SETTLE_ROUNDS = 150  # of "auto", after the acceptance has changed
SECONDS, REPEATS, CANDIDATES = 0.6, 3, 2  # of each run; runs of a kind, whose median counts; fixed shapes beside "auto"
SWEEP_SECONDS, SWEEP_REPEATS = 0.12, 2


class Run(NamedTuple):
    """Rounds in which all rows ran.  rows: how many.  ms: of each round by shape, as the engine measures it; none if plain."""

    rows: int
    rounds: int
    seconds: float
    ms: dict[str, list[float]]

    def rate(self, probability: float) -> float:
        """Tokens a second, where each level is accepted with that probability."""
        tokens = sum(accept_length(levels_of(label), probability) * len(ms) for label, ms in self.ms.items())
        return self.rows * (tokens or self.rounds) / self.seconds


def shapes_of(batch: int) -> list[SpecConfig]:
    """The fixed shapes of the sweep."""
    return [shape for shape in AUTO.shapes if shape.topk == 1 or batch <= 8]


def levels_of(label: str) -> int:
    """Levels of a shape; 0 of a round without any."""
    return int(label.split(",")[0]) if "," in label else 0


def probability_of(tau: float) -> float:
    """At which a chain of TAU_LEVELS levels emits `tau` tokens a round."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accept_length(TAU_LEVELS, middle) < tau else (low, middle)
    return low


def accept_length(levels: int, probability: float) -> float:
    return sum(probability**level for level in range(levels + 1))


class Bench:
    """One decoder with one batch size, all of whose rows run all the time."""

    def __init__(self, decoder: SpecDecoder, batch: int) -> None:
        without_prefill(decoder)
        clear_caches(decoder)  # whoever had the memory before may have left anything there
        self.session, self.rounds, self.captures = Session(decoder), timed_rounds(decoder), time_captures(decoder)
        self.session.force_acceptance([0.5])
        self.decoder, self.prompts = decoder, random_prompts(batch, CONTEXT)
        self.seeds = count()

    def run(
        self, seconds: float, probability: float, speculate: bool = True, shape: SpecConfig | None = None, rounds: int = 1
    ) -> Run:
        """At least so many seconds and so many full rounds.  shape: None for "auto", or where nothing speculates."""
        set_acceptance(self.decoder, probability)
        done, spent, found = 0, 0.0, defaultdict[str, list[float]](list)
        while spent < seconds or done < rounds:
            # What is accepted follows from seed and position: equal seeds would give each run the same luck.
            sampling = [SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=next(self.seeds)) for _ in self.prompts]
            work = Workload(self.session, self.prompts, sampling, speculate)
            with fixed_shape(self.decoder, shape) if shape else nullcontext(), work.running() as requests:
                torch.cuda.synchronize()
                start = end = time.perf_counter()
                kept = first = len(self.rounds)
                while end - start + spent < seconds or done < rounds:
                    self.session.step()
                    if any(request.is_done for request in requests):
                        break  # the step freed a row, so it does not count
                    end, done, kept = time.perf_counter(), done + 1, len(self.rounds)
            for label, ms in self.rounds[first:kept]:
                found[label].append(ms)
            spent += end - start
        return Run(len(self.prompts), done, spent, dict(found))


def sweep(bench: Bench, batch: int) -> dict[str, float]:
    """Milliseconds a round of each fixed shape, in the decoder of "auto", with everything captured before."""
    found = defaultdict[str, list[float]](list)
    for _ in range(SWEEP_REPEATS):
        for spec in shapes_of(batch):
            run = bench.run(SWEEP_SECONDS, 0.5, shape=spec)
            found[spec.label].append(1e3 * run.seconds / run.rounds)
    sweeps = {label: median(ms) for label, ms in found.items()}
    print(f"batch {batch}: ms a round " + ", ".join(f"{label} {ms:.2f}" for label, ms in sweeps.items()), flush=True)
    return sweeps


def line(bench: Bench, batch: int, tau: float, sweeps: dict[str, float], seconds: float, repeats: int) -> dict[str, Any]:
    """One accept length, by so many runs of each kind of so many seconds."""
    probability = probability_of(tau)
    promised = {label: accept_length(levels_of(label), probability) / ms for label, ms in sweeps.items()}
    labels = sorted(promised, key=lambda label: -promised[label])[: CANDIDATES if tau > 1 else 1]
    shapes = {spec.label: spec for spec in shapes_of(batch)}
    settling = bench.run(0.0, probability, rounds=SETTLE_ROUNDS)
    runs = defaultdict[str, list[Run]](list)
    for _ in range(repeats):
        runs["auto"].append(bench.run(seconds, probability))
        for label in labels:
            runs[label].append(bench.run(seconds, probability, shape=shapes[label]))
        runs["plain"].append(bench.run(seconds, probability, speculate=False))
    rates = {name: median(run.rate(probability) for run in found) for name, found in runs.items()}
    best = max(labels, key=lambda label: rates[label])
    ms = {name: _joined(found) for name, found in runs.items()}
    return {
        "batch": batch, "tau": tau, "probability": probability, "plain_tok_s": rates["plain"], "best_fixed": best,
        "fixed_tok_s": {label: rates[label] for label in labels}, "auto_tok_s": rates["auto"],
        "settling_tok_s": settling.rate(probability), "of_best": rates["auto"] / max(rates["plain"], rates[best]),
        "of_plain": rates["auto"] / rates["plain"],
        "auto_runs_tok_s": [run.rate(probability) for run in runs["auto"]],
        "auto_shapes": {
            label: {"rounds": len(each), "ms": median(each), "mean_ms": sum(each) / len(each), "sweep_ms": sweeps.get(label)}
            for label, each in ms["auto"].items()
        },
        "fixed_ms": {label: {"ms": median(ms[label][label]), "rounds": len(ms[label][label])} for label in labels},
        "reasons": bench.session.reasons,
    }  # fmt: skip


def _joined(runs: Sequence[Run]) -> dict[str, list[float]]:
    """The milliseconds of all these runs' rounds by shape."""
    found = defaultdict[str, list[float]](list)
    for run in runs:
        for label, ms in run.ms.items():
            found[label] += ms
    return found


def show(row: dict[str, Any]) -> None:
    fixed = ", ".join(f"{label} {rate:.0f}" for label, rate in row["fixed_tok_s"].items())
    shapes = ", ".join(
        f"{label} x{each['rounds']} {each['ms']:.2f}" + (f" ({each['sweep_ms']:.2f})" if each["sweep_ms"] else "")
        for label, each in sorted(row["auto_shapes"].items(), key=lambda item: -item[1]["rounds"])
    )
    again = ", ".join(f"{label} {each['ms']:.2f}" for label, each in row["fixed_ms"].items())
    print(
        f"  tau {row['tau']:3}: plain {row['plain_tok_s']:.0f}, {fixed}, auto {row['auto_tok_s']:.0f} = {row['of_best']:.1%} "
        f"of the best, {row['of_plain']:.1%} of plain; settling {row['settling_tok_s']:.0f}\n"
        f"    auto's rounds, ms (sweep): {shapes}; fixed beside it {again}\n    {'; '.join(row['reasons'])}",
        flush=True,
    )


def measure(
    model: Any,
    head: Any,
    batch: int,
    taus: Sequence[float],
    seconds: float,
    repeats: int,
    save: Callable[[dict[str, Any]], None],
) -> None:
    """One batch size.  save: takes the result so far, after each line."""
    bench, rows = Bench(make_decoder(model, head, AUTO, batch, CONTEXT, "round"), batch), []
    bench.run(0.05, 0.0, speculate=False)
    bench.run(0.1, 0.5)
    free, graphs, start = torch.cuda.mem_get_info()[0], bench.session.num_graphs, time.perf_counter()
    bench.session.make_ready([batch])
    taken, graphs = (free - torch.cuda.mem_get_info()[0]) / 2**20, bench.session.num_graphs - graphs
    print(f"{graphs} graphs captured ahead, in {time.perf_counter() - start:.1f} s, take {taken:.0f} MiB", flush=True)
    sweeps = sweep(bench, batch)
    for tau in taus:
        rows.append(line(bench, batch, tau, sweeps, seconds, repeats))
        show(rows[-1])
        save({"batch": batch, "sweep_ms": sweeps, "captures": bench.captures, "rows": rows})
    bench.decoder.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--taus", default="6,4.5,3,2,1.5,1", help="accept lengths; 1: no draft is ever right")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each run")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="runs of each kind, whose median counts")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, head = random_pair(4096, torch.device("cuda", 0))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "weights": "random", "dtype": "bfloat16",
        "auto": AUTO.label, "context": CONTEXT, "batches": [],
    }  # fmt: skip
    for batch in map(int, args.batches.split(",")):
        done = list(result["batches"])

        def save(row: dict[str, Any], done: list[dict[str, Any]] = done) -> None:
            result["batches"] = [*done, row]
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result, indent=1) + "\n")

        measure(model, head, batch, [float(tau) for tau in args.taus.split(",")], args.seconds, args.repeats, save)
