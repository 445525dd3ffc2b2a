"""Chunks and rounds that take turns, and both in one pass, under a Poisson load: a simulation over measured times.

    python benchmarks serving.mixed_load TIMES.json --out benchmarks/serving/results/mixed_load.json
    python benchmarks serving.mixed_load TIMES.json --batches 8 --requests 60   (quick)

TIMES.json is what serving.mixed_times measured.  The engine and the scheduler are the product's own.  Its runner has no device:
a step takes the time that was measured for it, interpolated, on a clock of its own, and every level of a draft is accepted with
one probability.  Prompts have 512 to 4,096 tokens, requests ask for 256, and rows are padded as for CUDA graphs.  The host
costs nothing, and every pass is taken to be captured, which favours small chunks.

A policy is named by how chunks run beside rounds, and by the most that such a chunk may cost:
turns:2048    chunks and rounds take turns, as they do where they can't share passes
turns:512     the same with smaller chunks
mixed:512     chunk and round in one pass, whose nodes and tokens are 512 together
grow:1024     the same with 1,024, or with a quarter of the tokens that wait, up to 2,048: what the product does

First every policy has all requests at once: tokens a second of a full server.  Then requests come at shares of what the first
policy serves then, at the same times for all policies.  Percentiles are as those of serving.serve_load; `pause` is the time
between two deliveries to one request, and a first token counts from the request's arrival.

Smaller chunks alone make pauses shorter and a full server slower.  So the last lines compare each policy of turns with the
mixed one that has the shortest 99th percentile between tokens, of those that serve at least 99 percent of its tokens a second.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from serving.clients import Record
from serving.numbers import latencies, pauses, percentiles
from specdec.config import SamplingParams, SpecConfig
from specdec.engine.chunks import ChunkBudget
from specdec.engine.launches.mixing import Mixing
from specdec.engine.loop import Engine
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.pool import PagePool
from specdec.engine.request import Request
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation
from specdec.generation import Emitted
from specdec.steps import LeaveRows, PromptPart, RunChunk, RunMixed, RunRound, Step

PROMPTS, MAX_TOKENS, ACCEPTANCE = (512, 4096), 256, 0.75
GROWN, ALONE, WHOLE, DOUBLING, DEPTH, PAGE = (
    2048,
    3072,
    8192,
    14_600.0,
    1,
    16,
)  # as the product has them for the 8B shape on a GPU
POLICIES = "turns:2048 turns:1024 turns:512 grow:1024 grow:512 mixed:2048 mixed:1024 mixed:512"
ALLOWED = 0.99  # of the tokens a second of the policy that a mixed one is compared with
LEAST = 1e-5  # seconds of any step; far from what was measured a line may fall below
LOADS = (0.5, 0.7, 0.9)


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear interpolation over ascending points, and beyond them along the first or last two; at least two points."""
    right = min(max(bisect_left([at for at, _ in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1 : right + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class StepTimes:
    """Seconds of steps by one entry of `settings` of serving.mixed_times.

    Attention of a chunk's token is taken to cost in proportion to the tokens before it, and that of a round to those of all
    its rows.  A mixed pass is what a round takes, and `extra` for the chunk.
    """

    def __init__(self, setting: dict[str, Any]) -> None:
        *rounds, longer = setting["rounds"]
        *chunks, cached = setting["chunks"]
        self.nodes = int(setting["nodes"])
        self.context = rounds[0]["context"]
        self._rounds = [(line["batch"], line["round_ms"] / 1e3) for line in rounds]
        more_keys = longer["batch"] * (longer["context"] - self.context)
        self._key = max(0.0, longer["round_ms"] / 1e3 - between(self._rounds, longer["batch"])) / more_keys
        (same,) = (line for line in chunks if line["tokens"] == cached["tokens"])
        self._pair = (cached["chunk_ms"] - same["chunk_ms"]) / 1e3 / (cached["tokens"] * cached["cached"])
        self._products = [(n := line["tokens"], line["chunk_ms"] / 1e3 - self._pair * n * n / 2) for line in chunks]
        self._extra = {batch: list(self._extras(setting, batch)) for batch, _ in self._rounds}

    def _extras(self, setting: dict[str, Any], batch: int) -> Iterator[tuple[float, float]]:
        """(tokens of a chunk, seconds by which its mixed pass is longer than the round, without the chunk's attention)."""
        yield 0.0, 0.0
        for line in setting["mixed"]:
            if line["batch"] == batch:
                tokens = line["total"] - batch * self.nodes
                yield tokens, (line["mixed_ms"] - line["round_ms"]) / 1e3 - self._pair * tokens * (line["cached"] + tokens / 2)

    def round(self, rows: int, keys: int) -> float:
        """keys: tokens of all rows."""
        return max(LEAST, between(self._rounds, rows) + self._key * (keys - rows * self.context))

    def pairs(self, parts: Sequence[PromptPart]) -> float:
        """Seconds of the attention of a chunk."""
        return self._pair * sum(len(part.token_ids) * (part.start + len(part.token_ids) / 2) for part in parts)

    def chunk(self, parts: Sequence[PromptPart]) -> float:
        tokens = sum(len(part.token_ids) for part in parts)
        return max(LEAST, between(self._products, max(tokens, self._products[0][0])) + self.pairs(parts))

    def mixed(self, rows: int, keys: int, parts: Sequence[PromptPart]) -> float:
        tokens = sum(len(part.token_ids) for part in parts)
        extra = between([(batch, between(points, tokens)) for batch, points in self._extra.items()], rows)
        return max(LEAST, self.round(rows, keys) + extra + self.pairs(parts))


class Arriving:
    """What a step emits, at a time of the virtual clock."""

    ended: Sequence[int] = ()

    def __init__(self, runner: ClockRunner, at: float, emitted: list[Emitted]) -> None:
        self.runner, self.at, self.emitted = runner, at, emitted

    def read(self) -> list[Emitted]:
        self.runner.now = max(self.runner.now, self.at)
        return self.emitted

    def drop(self) -> None:
        """Nothing is kept for it."""

    def seconds(self) -> float:
        raise AssertionError("no step is timed")


class ClockRunner:
    """A runner without a device.  now: the host's time, seconds.  busy: of which the device worked."""

    def __init__(self, times: StepTimes, rng: random.Random) -> None:
        self.times, self.rng = times, rng
        self.now = self.busy = self._free = 0.0
        self.lens: dict[int, int] = {}  # tokens of each row whose prompt has run
        self.steps = {"round": 0, "chunk": 0, "mixed": 0}

    def run(self, step: Step) -> Arriving | None:
        if isinstance(step, LeaveRows):
            before = dict(self.lens)
            self.lens |= {target: before[source] for source, target in step.moves if source in before}
            self.lens = {row: tokens for row, tokens in self.lens.items() if row not in step.cleared}
        keys = sum(self.lens.values())
        if isinstance(step, RunChunk):
            return self._arriving("chunk", self.times.chunk(step.parts), self._firsts(step))
        if isinstance(step, RunMixed):
            seconds = self.times.mixed(step.round.rows, keys, step.chunk.parts)
            return self._arriving("mixed", seconds, [*self._emitted(step.round), *self._firsts(step.chunk)])
        if isinstance(step, RunRound):
            return self._arriving("round", self.times.round(step.rows, keys), self._emitted(step))
        return None

    def _arriving(self, kind: str, seconds: float, emitted: list[Emitted]) -> Arriving:
        self._free = max(self.now, self._free) + seconds
        self.busy += seconds
        self.steps[kind] += 1
        return Arriving(self, self._free, emitted)

    def _emitted(self, step: RunRound) -> list[Emitted]:
        """What each row of a round emits.  Rows whose prompts have not run yet are padding."""
        emitted = []
        for row in range(step.rows):
            accepted = 0
            while row in self.lens and accepted < step.depths and self.rng.random() < ACCEPTANCE:
                accepted += 1
            if row in self.lens:
                self.lens[row] += accepted + 1
            emitted.append(Emitted([8] * (accepted + 1)))
        return emitted

    def _firsts(self, chunk: RunChunk) -> list[Emitted]:
        self.lens |= {part.row: part.end for part in chunk.parts if part.is_last}
        return [Emitted([7] if part.emits else []) for part in chunk.parts]


class Policy(NamedTuple):
    """kind: turns, mixed or grow.  most: see the top of this file."""

    kind: str
    most: int

    @classmethod
    def of(cls, text: str) -> Policy:
        kind, most = text.split(":")
        return cls(kind, int(most))

    def scheduler(self, rows: int, spec: SpecConfig) -> Scheduler:
        most = PROMPTS[1] + MAX_TOKENS + spec.lookahead
        admission = Admission(PagePool((rows + 1) * (most // PAGE + 2), PAGE), spec.lookahead, prefix_caching=False)
        budget = ChunkBudget(GROWN if self.kind == "grow" else self.most, ALONE, WHOLE, DOUBLING)
        mixing = None if self.kind == "turns" else Mixing(self.most)
        return Scheduler(admission, budget, Speculation((spec,)), rows, True, mixing=mixing)


class Arrival(NamedTuple):
    """at: seconds from the start.  tokens: of the prompt."""

    at: float
    tokens: int


def arrivals(count: int, rate: float | None, seed: int) -> list[Arrival]:
    """Requests of a Poisson process; all at once where there is no rate.  The same prompts for one seed, whatever the rate."""
    rng = random.Random(seed)
    drawn = [(rng.expovariate(1.0), rng.randint(*PROMPTS)) for _ in range(count)]
    times = accumulate(gap for gap, _ in drawn)
    return [Arrival(0.0 if rate is None else at / rate, tokens) for at, (_, tokens) in zip(times, drawn, strict=True)]


def simulate(
    times: StepTimes,
    policy: Policy,
    rows: int,
    spec: SpecConfig,
    coming: Sequence[Arrival],
    keep: Callable[[list[Record]], None] = lambda records: None,
) -> dict[str, Any]:
    """Runs all requests to their ends.  keep: gets what was seen of each."""
    runner = ClockRunner(times, random.Random(0))
    engine = Engine(policy.scheduler(rows, spec), runner, DEPTH)
    records: dict[Request, Record] = {}
    due = list(reversed(coming))
    live: list[Request] = []
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    while due or live:
        if not live:
            runner.now = max(runner.now, due[-1].at)
        while due and due[-1].at <= runner.now:
            at, tokens = due.pop()
            request = Request.new([7] * tokens, sampling, 0, frozenset(), lambda ids: "", False)
            records[request] = Record(len(records), at, sent=at)
            live.append(request)
            engine.submit([request])
        engine.step()
        for request in live:
            record, written = records[request], len(request.output.token_ids)
            if written > record.tokens:
                record.chunks.append((runner.now, written - record.tokens))
                record.tokens, record.ended = written, runner.now
        live = [request for request in live if not request.is_done]
    assert all(record.tokens == MAX_TOKENS for record in records.values())
    keep(list(records.values()))
    return summary(runner, list(records.values()))


def summary(runner: ClockRunner, records: Sequence[Record]) -> dict[str, Any]:
    found = latencies(records)
    pause = percentiles(pause for record in records for pause in pauses(record))
    return {
        "seconds": runner.now, "tok_s": sum(record.tokens for record in records) / runner.now,
        "requests_s": len(records) / runner.now, "busy": runner.busy / runner.now, "steps": runner.steps,
        "first_token_ms": found["first_token_ms"], "between_tokens_ms": found["between_tokens_ms"]["all"],
        "pause_ms": pause, "longest_pause_ms": found["longest_pause_ms"],
    }  # fmt: skip


def gains(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each policy of turns of one batch: the best mixed policy that serves as many tokens, and how many times shorter or
    more its numbers are, by load.
    """
    by_policy: dict[str, dict[float | None, dict[str, Any]]] = {}
    for line in lines:
        by_policy.setdefault(line["policy"], {})[line["load"]] = line
    for name, turns in by_policy.items():
        ratios = {other: [ratio(turns[load], mixed[load]) for load in turns] for other, mixed in by_policy.items()}
        fit = [each for each in by_policy if each[0] != "t" and min(row["tok_s"] for row in ratios[each]) >= ALLOWED]
        if name[0] == "t" and fit:
            best = min(fit, key=lambda each: sum(row["between_p99"] for row in ratios[each]))
            yield {"than": name, "policy": best, "ratios": ratios[best]}


def ratio(turns: dict[str, Any], mixed: dict[str, Any]) -> dict[str, Any]:
    """How many times the numbers of `turns` those of `mixed` are."""
    keys = {"between_p99": "between_tokens_ms", "pause_p99": "pause_ms", "first_p99": "first_token_ms"}
    times = {name: mixed[key]["p99"] / turns[key]["p99"] for name, key in keys.items()}
    return {"load": turns["load"], "tok_s": mixed["tok_s"] / turns["tok_s"], **times}


def show(line: dict[str, Any]) -> None:
    pairs = "  ".join(
        f"{name} {line[f'{key}_ms']['p50']:.1f}/{line[f'{key}_ms']['p99']:.1f}"
        for name, key in (("between", "between_tokens"), ("pause", "pause"), ("first", "first_token"))
    )
    load = "all at once" if line["load"] is None else f"load {line['load']:.2f}"
    print(f"batch {line['batch']:>2} {load:>11} {line['policy']:>11}: "
          f"{line['tok_s']:7.0f} tok/s  ms p50/p99: {pairs}  {line['steps']}", flush=True)  # fmt: skip


def show_gain(gain: dict[str, Any]) -> None:
    print(f"{gain['quantize']} {gain['spec']} batch {gain['batch']}: {gain['policy']} beside {gain['than']}", flush=True)
    for row in gain["ratios"]:
        load = "all at once" if row["load"] is None else f"load {row['load']:.2f}"
        print(f"  {load:>11}: tok/s {row['tok_s']:.3f} times; p99 between tokens {row['between_p99']:.3f}, "
              f"of pauses {row['pause_p99']:.3f}, to the first token {row['first_p99']:.3f}")  # fmt: skip


def of_batch(
    times: StepTimes, spec: SpecConfig, batch: int, policies: Sequence[str], requests: int
) -> Iterator[dict[str, Any]]:
    """Each policy with all requests at once, then at the loads."""
    rate = None
    for load in (None, *LOADS):
        coming = arrivals(requests, load and rate and load * rate, batch)
        for name in policies:
            found = simulate(times, Policy.of(name), batch, spec, coming)
            rate = found["requests_s"] if rate is None else rate
            line = {"load": load, "policy": name, **found}
            show({"batch": batch, **line})
            yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path)
    parser.add_argument("--batches", default="8,16,32")
    parser.add_argument("--policies", default=POLICIES, help="separated by blanks")
    parser.add_argument("--requests", type=int, default=20, help="for each row")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measured, lines, found_gains = json.loads(args.times.read_text()), list[dict[str, Any]](), list[dict[str, Any]]()
    for setting in measured["settings"]:
        times, spec = StepTimes(setting), SpecConfig(*map(int, setting["spec"].strip("()").split(",")))
        most = max(line["batch"] for line in setting["rounds"])
        for batch in (batch for batch in map(int, args.batches.split(",")) if batch <= most):
            label = {"quantize": setting["quantize"], "spec": setting["spec"], "batch": batch}
            new = [label | line for line in of_batch(times, spec, batch, args.policies.split(), batch * args.requests)]
            lines += new
            found_gains += [label | gain for gain in gains(new)]
    for gain in found_gains:
        show_gain(gain)
    result = {"times": measured | {"settings": None}, "date": time.strftime("%Y-%m-%d"), "prompts": PROMPTS,
              "max_tokens": MAX_TOKENS, "acceptance": ACCEPTANCE, "requests_a_row": args.requests,
              "lines": lines, "gains": found_gains}  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
