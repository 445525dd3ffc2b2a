"""A finished measurement: raw counters and times, and every number that is derived from them.

Every derived number is defined here and nowhere else.  This file knows no model and does no measuring: `run` fills a
measurement, and the folder `show` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any, Literal, NamedTuple

from specdec.bench.budget import BUDGET_DEFINITIONS, PHASES, Budget
from specdec.generation import Stats
from specdec.lossless.verification import Divergence

REPEAT_N = 6  # tokens of an n-gram, about four or five words
REPEAT_FLAG = 0.3

DEFINITIONS = {
    "accept_length": "tau = emitted / rounds of the timed repeats' requests: tokens per verify pass of one sequence, bonus "
    "included, before trimming. So it is an average over tokens, in which long texts count more; in accept_length_by_request, "
    "the mean of each request's own, all requests count alike",
    "batch_rounds": "rounds of the whole batch (steps of plain decoding) in each timed repeat",
    "cold, cold_timed": "passes during which a kernel was compiled, a graph captured or a chunk of prompts met for the first "
    "time. They are run again, and not counted, except cold_timed of them: the last ones, after too many",
    "bench_seconds": "wall seconds of the benchmark itself: decoder (KV pool, workers), compiling, prompts (to their first "
    "tokens, with the capture of chunks), capturing rounds, warm-up (short texts, and cold passes), timed, phases, comparing "
    "(with a look at near-ties), profile; of all together, loading and cells",
    "acceptance_by_depth": "conditional: rounds accepted at depth i / rounds that reached depth i (all shallower ones "
    "accepted); null where none did",
    "plain_cells": "what was measured where no draft was given: plain decoding, which is one side, so nothing is compared",
    "tokens_per_second": "median over the timed repeats of output tokens (trimmed) / wall seconds of generate(), prefill "
    "included, for all prompts together",
    "speed_up": "tokens_per_second of speculative / tokens_per_second of specdec's own autoregressive decoding: same "
    "process, engine, prompts and max_tokens, warmed alike, in alternating order; null if outputs differ beyond near-ties or "
    "are empty",
    "ms_per_round, ms_per_step": "from a pass of its own, over the first prompts, that waits for every phase: (wall - prefill) "
    "/ rounds (steps) of the batch, where a round may be a plain step ('decode') if num_steps is auto; 'rest' is the time that "
    "no named phase took, which is host work. phases.share: of all prompts' tokens, those that this pass read",
    "predicted_speed_up": "accept_length * ms_per_step / ms_per_round: what it would be if every batch stayed full and prompts "
    "took no time; null if num_steps is auto, since the pass that waits for phases chooses other shapes than the repeats",
    "speed_up_factors": "predicted_speed_up times all three is speed_up. uneven_ends: (steps / rounds of the batch) / "
    "accept_length; sequences end after different numbers of rounds, so that the last rounds run half empty, and tokens after "
    "the end are cut off. prefill: both sides' prefill, which the draft makes longer. other: from the pass that waits for "
    "phases to the timed repeats, noise included",
    "outputs": "each prompt's ids of each pass that is measured (repeats, and phases over the first prompts), speculative "
    "against baseline. near-tie: by "
    "the logits of a dense pass in a wider dtype both tokens lie within the bound of the best, where the bound is twice what "
    "rounding moves such logits on the same text without speculation; never accepted in float32. DIVERGED: anything "
    "else, also where a mixture of experts in 16 bit parts by more because a router flipped between two passes. EMPTY: some "
    "prompt's output held nothing, on either side, so that being equal would prove nothing",
    "failures": "batch sizes and tree shapes in which a request or the engine failed; message says how",
    "repeat_ratio": f"mean over baseline outputs of the share of {REPEAT_N}-grams of tokens that occurred before in the same "
    f"output; above {REPEAT_FLAG} the text loops, which inflates acceptance",
    "counters": "rounds: verify passes of one sequence. drafted, accepted: draft tokens. emitted: accepted + bonus. truncated: "
    "cut off after the end. prefill_tokens + emitted - truncated = output tokens, asserted per request",
    "synthetic_acceptance": "if not null: acceptance was forced, depth by depth, to these conditional probabilities along each "
    "tree's best path (less where that path was pruned: acceptance_by_depth is what happened). The speculative text is not the "
    "target's, so outputs are not compared, and repeat_ratio says nothing about acceptance",
    **{f"budgets.{name}": text for name, text in BUDGET_DEFINITIONS.items()},
}


Verdict = Literal["equal", "near-tie", "DIVERGED", "EMPTY", "SYNTHETIC"]


@dataclass(frozen=True)
class Phases:
    """One pass in which every phase was waited for.

    calls: how often a phase ran for the whole batch.  share: of all prompts' tokens, those that the pass read.
    """

    wall_seconds: float
    seconds: dict[str, float]
    calls: dict[str, int]
    share: float = 1.0

    @property
    def rounds(self) -> int:
        """Rounds of the batch, or steps of plain decoding."""
        return self.calls.get("verify", 0) + self.calls.get("decode", 0)

    @property
    def ms_per_round(self) -> float:
        """Everything but prefill."""
        return 1e3 * (self.wall_seconds - self.seconds.get("prefill", 0.0)) / self.rounds if self.rounds else 0.0

    @property
    def prefill_ms(self) -> float:
        """Of all prompts.  Where the pass read a share of them, in proportion to their tokens."""
        return 1e3 * self.seconds.get("prefill", 0.0) / self.share

    def ms(self, name: str) -> float:
        """Milliseconds of one phase in a round; `rest` is the time that the named phases leave."""
        if name != "rest":
            return 1e3 * self.seconds.get(name, 0.0) / self.rounds if self.rounds else 0.0
        return self.ms_per_round - sum(self.ms(other) for other in PHASES)


@dataclass(frozen=True)
class SideResult:
    """What one side, baseline or speculative, took.  Lists have one entry a timed repeat; counters are summed over them.

    batch_rounds: rounds of the batch, or steps of plain decoding.  accept_length_by_request: the mean of each request's own.
    cold: passes that compiled or captured something, and cold_timed: those of them that count all the same.
    """

    seconds: list[float]
    output_tokens: list[int]
    counters: Stats
    phases: Phases
    batch_rounds: list[int]
    accept_length_by_request: float
    cold: int = 0
    cold_timed: int = 0

    @property
    def rates(self) -> list[float]:
        """Output tokens per second of each timed repeat."""
        return [tokens / seconds for tokens, seconds in zip(self.output_tokens, self.seconds, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        return median(self.rates)

    @property
    def rounds_ms(self) -> float:
        """Milliseconds of all rounds of a timed repeat, by what a round takes in the pass that waits for phases."""
        return mean(self.batch_rounds) * self.phases.ms_per_round


class SpeedUpFactors(NamedTuple):
    """Predicted times all three is the measured speed-up; each is 1 where its cause is absent."""

    uneven_ends: float
    prefill: float
    other: float


@dataclass(frozen=True)
class Outputs:
    """Whether both sides wrote the same.

    is_synthetic: acceptance was forced, so nothing was compared.  empty: numbers of the prompts for which some pass wrote
    nothing.
    """

    prompts: int
    passes: int
    differing: list[Divergence]
    is_synthetic: bool = False
    empty: list[int] = field(default_factory=list)

    @property
    def num_equal(self) -> int | None:
        """Prompts whose outputs are equal and not empty."""
        return None if self.is_synthetic else self.prompts - len({d.prompt for d in self.differing} | set(self.empty))

    @property
    def verdict(self) -> Verdict:
        if any(d.verdict == "DIVERGED" for d in self.differing):
            return "DIVERGED"
        if self.empty:
            return "EMPTY"
        if self.is_synthetic:
            return "SYNTHETIC"
        return "near-tie" if self.differing else "equal"

    @property
    def are_wrong(self) -> bool:
        """Whether no speed-up may be claimed for them."""
        return self.verdict in ("DIVERGED", "EMPTY")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes.  peak: of the GPU's allocator over this cell, or of the whole process so far on a CPU (`peak_of` says which)."""

    weights: int
    kv_pool: int
    peak: int
    peak_of: str


@dataclass(frozen=True)
class Cell:
    """One batch size with one tree shape (S, k, nd); S may be "auto".

    reasons: for each number of rows, which shape "auto" ran in the end, and why; nothing for a fixed shape.  bench_seconds: of
    the benchmark itself, by what they were spent on.
    """

    batch_size: int
    spec: tuple[int | str, ...]
    baseline: SideResult
    speculative: SideResult
    outputs: Outputs
    repeat_ratio: float
    memory: MemoryUse
    reasons: list[str] = field(default_factory=list)
    bench_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return ",".join(map(str, self.spec))

    @property
    def acceptance_by_depth(self) -> list[float | None]:
        """None at depths that no round reached: nothing is known of them."""
        counters = self.speculative.counters
        pairs = zip(counters.acceptance_by_depth, counters.reached_by_depth, strict=True)
        return [share if reached else None for share, reached in pairs]

    @property
    def speed_up(self) -> float | None:
        """None where the outputs differ or are empty: a faster wrong answer is no speed-up."""
        if self.outputs.are_wrong:
            return None
        return self.speculative.tokens_per_second / self.baseline.tokens_per_second

    @property
    def gain(self) -> float:
        """The speed-up of a cell that has one."""
        assert self.speed_up is not None
        return self.speed_up

    @property
    def speed_ups(self) -> list[float]:
        """The speed-up of each timed repeat alone.  How far they lie apart says how quiet the machine was."""
        return [fast / plain for fast, plain in zip(self.speculative.rates, self.baseline.rates, strict=True)]

    @property
    def predicted_speed_up(self) -> float | None:
        """None where the shape is chosen for every round: the pass that times phases runs other rounds than the repeats."""
        if self.spec[0] == "auto":
            return None
        step, round_ = self.baseline.phases.ms_per_round, self.speculative.phases.ms_per_round
        if not step or not round_ or self.speed_up is None:
            return None
        return self.speculative.counters.accept_length * step / round_

    @property
    def speed_up_factors(self) -> SpeedUpFactors | None:
        """Why the measured speed-up is not the predicted one; None where there is none of the two."""
        predicted, measured = self.predicted_speed_up, self.speed_up
        if not predicted or measured is None:
            return None
        plain, fast = self.baseline, self.speculative
        without_prefill = plain.rounds_ms / fast.rounds_ms
        waited_for = (plain.rounds_ms + plain.phases.prefill_ms) / (fast.rounds_ms + fast.phases.prefill_ms)
        return SpeedUpFactors(without_prefill / predicted, waited_for / without_prefill, measured / waited_for)


@dataclass(frozen=True)
class PlainCell:
    """One batch size of a target without a draft: plain decoding alone, with nothing to be compared with.

    empty: numbers of the prompts for which some pass wrote nothing.  bench_seconds: see Cell.
    """

    batch_size: int
    baseline: SideResult
    empty: list[int]
    repeat_ratio: float
    memory: MemoryUse
    bench_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A batch size and tree shape that could not be measured to the end.  spec: None for a target without a draft."""

    batch_size: int
    spec: tuple[int | str, ...] | None
    message: str

    @property
    def name(self) -> str:
        return "plain decoding" if self.spec is None else ",".join(map(str, self.spec))


@dataclass(frozen=True)
class Measurement:
    """All cells, budgets if they were asked for, and what is needed to repeat them.

    synthetic_acceptance: the probabilities that acceptance was forced to, by depth.  failures: what failed.  plain_cells: there
    instead of cells where the target has no draft.  bench_seconds: of the benchmark, up to the loaded pair and after that.
    """

    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    prompts: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)
    synthetic_acceptance: list[float] | None = None
    failures: list[Failure] = field(default_factory=list)
    plain_cells: list[PlainCell] = field(default_factory=list)
    bench_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def diverged(self) -> bool:
        """Whether anything went wrong with the outputs: some differ, are empty, or were never written."""
        wrong = any(cell.outputs.are_wrong for cell in self.cells) or any(cell.empty for cell in self.plain_cells)
        return bool(self.failures) or wrong

    @property
    def right(self) -> list[Cell]:
        """The cells that have a speed-up."""
        return [cell for cell in self.cells if cell.speed_up is not None]

    @property
    def best(self) -> dict[int, Cell]:
        """Of these the fastest of each batch size."""
        sizes = dict.fromkeys(cell.batch_size for cell in self.right)
        return {size: max((c for c in self.right if c.batch_size == size), key=lambda c: c.gain) for size in sizes}

    def baselines(self, batch_size: int) -> list[float]:
        """Tokens per second of every timed pass of plain decoding at this batch size.  They are equal but for noise."""
        return [rate for cell in self.cells if cell.batch_size == batch_size for rate in cell.baseline.rates]

    def noise(self, cell: Cell) -> tuple[float, float] | None:
        """Between which speed-ups the cell's own may lie: those of single repeats; where there is one, what the baselines of
        other shapes say.  None: nothing says it, or there is no speed-up."""
        if cell.speed_up is None:
            return None
        if len(cell.speed_ups) > 1:
            return min(cell.speed_ups), max(cell.speed_ups)
        rates = self.baselines(cell.batch_size)
        spread = max(rates) / min(rates)
        return None if len(rates) == 1 else (cell.speed_up / spread, cell.speed_up * spread)

    def as_json(self) -> dict[str, Any]:
        """Raw fields, and beside each cell's the numbers derived from them."""
        data = asdict(self)
        for cell, raw in zip(self.cells, data["cells"], strict=True):
            raw["derived"] = _derived(cell)
        for plain, raw in zip(self.plain_cells, data["plain_cells"], strict=True):
            phases = plain.baseline.phases
            raw["derived"] = {
                "tokens_per_second": plain.baseline.tokens_per_second,
                "ms_per_step": phases.ms_per_round,
                "prefill_ms": phases.prefill_ms,
            }
        data["budgets"] = [budget.as_json() for budget in self.budgets]
        return {"format": "specdec bench 1", "definitions": DEFINITIONS, **data}


def _derived(cell: Cell) -> dict[str, Any]:
    fast, plain = cell.speculative, cell.baseline
    return {
        "accept_length": fast.counters.accept_length,
        "acceptance_by_depth": cell.acceptance_by_depth,
        "tokens_per_second": {"baseline": plain.tokens_per_second, "speculative": fast.tokens_per_second},
        "speed_up": cell.speed_up,
        "speed_up_of_each_repeat": cell.speed_ups if cell.speed_up is not None else None,
        "predicted_speed_up": cell.predicted_speed_up,
        "speed_up_factors": None if cell.speed_up_factors is None else cell.speed_up_factors._asdict(),
        "slower_than_baseline": cell.speed_up is not None and cell.speed_up < 1,
        "ms_per_step": plain.phases.ms_per_round,
        "ms_per_round": fast.phases.ms_per_round,
        "ms_per_round_by_phase": {name: fast.phases.ms(name) for name in (*PHASES, "rest")},
        "prefill_ms": {"baseline": plain.phases.prefill_ms, "speculative": fast.phases.prefill_ms},
        "outputs": cell.outputs.verdict,
        "outputs_equal": cell.outputs.num_equal,
    }


def repeat_ratio(outputs: Sequence[Sequence[int]], n: int = REPEAT_N) -> float:
    """Mean share of n-grams that occurred before in the same output; outputs shorter than n have none."""
    shares = []
    for ids in outputs:
        grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        shares.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return sum(shares) / len(shares) if shares else 0.0
