#!/usr/bin/env python3
"""SpecConfig("auto") against plain decoding and against fixed shapes, where acceptance is forced: the 8B shape, random weights.

    python benchmarks/controller.py --out benchmarks/results/controller.json
    python benchmarks/controller.py --batches 1,32 --taus 1,3

Each level of a tree is accepted with one probability, given that the level above it was.  An accept length of 3 means the
probability at which a chain of 7 levels would emit 3 tokens a round; 1 means that no draft is ever right.  Only the best path
of a tree can be accepted, so a tree gains nothing over a chain of its depth, and has to be told from it by its cost.

A fixed shape's milliseconds a round are measured over rounds in which all rows run, in the same decoder.  Its tokens a second
follow from these and from the accept length, which is known.  "auto" is measured: tokens over seconds, its looks at other
shapes included, after some rounds at the same acceptance in which it may settle.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from engine_internals import clear_caches, count_rounds, fixed_shape, set_acceptance, time_captures, without_prefill
from round_8b import make_decoder, random_pair, random_prompts

from specdec.bench.profile import Work
from specdec.bench.session import Session
from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder

TAU_LEVELS = 7  # of the chain whose accept length names a line
AUTO = SpecConfig("auto", 4, 16)
CONTEXT = 1024
MAX_TOKENS = 900
SECONDS, SETTLE_SECONDS, SHAPE_SECONDS = 1.2, 0.5, 0.25  # at least; of "auto" and plain decoding, before these, and of a shape


class Run(NamedTuple):
    """Rounds in which all rows ran.  tokens: of all rows.  shapes: rounds by shape; those in flight at the ends blur it."""

    rounds: int
    tokens: int
    seconds: float
    shapes: dict[str, int]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def ms(self) -> float:
        return 1e3 * self.seconds / self.rounds


def shapes_of(batch: int) -> list[SpecConfig]:
    """The fixed shapes of the sweep."""
    chains = [SpecConfig(levels, 1) for levels in ((1, 2, 3, 5, 7, 10) if batch <= 8 else (1, 2, 3, 5, 7))]
    return [*chains, *([SpecConfig(5, 4, 16)] if batch <= 8 else [])]


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
        self.session, self.counts, self.captures = Session(decoder), count_rounds(decoder), time_captures(decoder)
        self.session.force_acceptance([0.5])
        self.decoder, self.prompts = decoder, random_prompts(batch, CONTEXT)
        self.sampling = [SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=row) for row in range(batch)]

    def run(self, seconds: float, probability: float, speculate: bool) -> Run:
        """At least so many seconds of full rounds."""
        set_acceptance(self.decoder, probability)
        rounds, tokens, spent = 0, 0, 0.0
        shapes = Counter[str]()
        while spent < seconds:
            work = Work(self.session, self.prompts, self.sampling, speculate)
            with work.running() as requests:
                torch.cuda.synchronize()
                before, counted = sum(request.num_tokens for request in requests), Counter(self.counts)
                start = end = time.perf_counter()
                after, done, launched = before, 0, counted
                while end - start + spent < seconds:
                    self.session.step()
                    if any(request.is_done for request in requests):
                        break  # the step freed a row, so it does not count
                    end, done = time.perf_counter(), done + 1
                    after, launched = sum(request.num_tokens for request in requests), Counter(self.counts)
            rounds, tokens, spent = rounds + done, tokens + after - before, spent + end - start
            shapes += launched - counted
        return Run(rounds, tokens, spent, dict(shapes))


def sweep(bench: Bench, batch: int) -> dict[str, float]:
    """Milliseconds a round of each fixed shape, in the decoder of "auto", with everything captured before."""
    found = {}
    for spec in shapes_of(batch):
        with fixed_shape(bench.decoder, spec):
            found[spec.label] = bench.run(SHAPE_SECONDS, 0.5, speculate=True).ms
    print(f"batch {batch}: ms a round " + ", ".join(f"{label} {ms:.2f}" for label, ms in found.items()), flush=True)
    return found


def line(bench: Bench, batch: int, tau: float, fixed: dict[str, float], plain: float) -> dict[str, Any]:
    """One accept length.  plain: tokens a second without drafts."""
    probability = probability_of(tau)
    rates = {label: batch * 1e3 * accept_length(int(label.split(",")[0]), probability) / ms for label, ms in fixed.items()}
    best = max(rates, key=lambda label: rates[label])
    settle = bench.run(SETTLE_SECONDS, probability, speculate=True)
    auto = bench.run(SECONDS, probability, speculate=True)
    # What the same rounds would have emitted by expectation: at batch 1 luck is as large as what is to be seen.
    levels = {label: int(label.split(",")[0]) if "," in label else 0 for label in auto.shapes}
    expected = batch * sum(count * accept_length(levels[label], probability) for label, count in auto.shapes.items())
    expected *= auto.rounds / max(1, sum(auto.shapes.values())) / auto.seconds
    return {
        "batch": batch, "tau": tau, "probability": probability, "plain_tok_s": plain, "best_fixed": best,
        "best_fixed_tok_s": rates[best], "auto_tok_s": auto.rate, "auto_expected_tok_s": expected,
        "of_best": expected / max(plain, rates[best]), "of_plain": expected / plain, "settling_tok_s": settle.rate,
        "rounds": auto.rounds, "shapes": auto.shapes, "reasons": bench.session.reasons,
    }  # fmt: skip


def measure(model: Any, head: Any, batch: int, taus: Sequence[float], save: Callable[[dict[str, Any]], None]) -> None:
    """One batch size.  save: takes the result so far, after each line."""
    bench, rows = Bench(make_decoder(model, head, AUTO, batch, CONTEXT, "round"), batch), []
    bench.run(0.05, 0.0, speculate=False)
    bench.run(0.1, 0.5, speculate=True)
    free, graphs, start = torch.cuda.mem_get_info()[0], bench.session.num_graphs, time.perf_counter()
    bench.session.make_ready([batch])
    taken, graphs = (free - torch.cuda.mem_get_info()[0]) / 2**20, bench.session.num_graphs - graphs
    print(f"{graphs} graphs captured ahead, in {time.perf_counter() - start:.1f} s, take {taken:.0f} MiB", flush=True)
    fixed, plain = sweep(bench, batch), bench.run(SECONDS, 0.0, speculate=False)
    for tau in taus:
        rows.append(line(bench, batch, tau, fixed, plain.rate))
        row = rows[-1]
        print(
            f"  tau {tau:3}: plain {plain.rate:7.0f}, best fixed {row['best_fixed']:>6} {row['best_fixed_tok_s']:7.0f}, auto "
            f"{row['auto_tok_s']:7.0f} (expected {row['auto_expected_tok_s']:7.0f}) = {row['of_best']:.1%} of the best, "
            f"{row['of_plain']:.1%} of plain; {row['shapes']}\n    {'; '.join(bench.session.reasons)}",
            flush=True,
        )
        save({"batch": batch, "plain_ms": plain.ms, "fixed_ms": fixed, "captures": bench.captures, "rows": rows})
    bench.decoder.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--taus", default="6,4.5,3,2,1.5,1", help="accept lengths; 1: no draft is ever right")
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

        measure(model, head, batch, [float(tau) for tau in args.taus.split(",")], save)


if __name__ == "__main__":
    main()
