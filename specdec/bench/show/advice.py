"""What to try next, from what a measurement shows: the most useful first.

Each tip is a flag or a command and the reason for it, with the numbers that it follows from.  Knows no console.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import NamedTuple

from specdec.bench.measurement import REPEAT_FLAG, Cell, Measurement
from specdec.config import SpecConfig
from specdec.draft.kinds import kind_of
from specdec.limits import MAX_STEPS

WORTH = 1.05  # a predicted gain below it is not mentioned
FURTHER = 3  # levels after the last one that was measured about which something is predicted
MIN_REACHED = 20  # rounds that reached the last level, below which nothing is said of further ones
NOISY = 1.15  # a speed-up whose repeats lie further apart, or baselines that do, are said to be noisy
SHORT_SECONDS = 0.3  # a timed pass that takes less is mostly its beginning and its end
CHAIN, AUTO = SpecConfig(5, 1, 6), SpecConfig("auto", 4, 16)


class Tip(NamedTuple):
    """what: to do or to type.  why: the reason, a sentence without a full stop."""

    what: str
    why: str


def advice(measurement: Measurement) -> list[Tip]:
    """All tips."""
    if measurement.plain_cells:
        return [Tip("--draft ngram, or --draft DIR with a trained head", "there was no draft to speculate with")]
    tips = [*_wrong(measurement), *_slower(measurement), *_chain(measurement)]
    if measurement.synthetic_acceptance is None:
        tips += _shapes(measurement)
    return [*tips, *_noise(measurement), *_texts(measurement.right), *_profile(measurement)]


def _wrong(measurement: Measurement) -> list[Tip]:
    tips = []
    if any(cell.outputs.verdict == "DIVERGED" for cell in measurement.cells):
        tips.append(Tip("specdec verify with the same flags, and --details here", "they name the tokens at which texts part"))
        if measurement.settings["dtype"] != "float32":
            tips.append(Tip("--dtype float32", "it tells rounding from a fault: texts must be equal there"))
    return tips


def _slower(measurement: Measurement) -> list[Tip]:
    """About batch sizes at which even the best shape is slower than plain decoding."""
    settings, right, tips = measurement.settings, measurement.right, list[Tip]()
    lost = [size for size, cell in measurement.best.items() if cell.gain < 1]
    if not lost:
        return tips
    at = "at batch " + ", ".join(map(str, lost))
    if (kind := kind_of(settings["draft"])) and kind.pays:
        called, where = kind.pays
        shapes = {"trees" if cell.spec[1] != 1 else "chains" for cell in right}
        what = f"{called} {' and '.join(sorted(shapes))} are slower than plain decoding {at}"
        tips.append(Tip("no --draft, or --draft DIR with a trained head", f"{what}; they pay {where}"))
    else:
        tips.append(Tip("no --draft, or a better head", f"plain decoding is faster {at} with every shape that was measured"))
    if not any(cell.spec[0] == "auto" for cell in right):
        why = "it decides for every round whether to draft, and stays plain where that is faster"
        tips.append(Tip(f"--spec {AUTO.label}", why))
    return tips


def _shapes(measurement: Measurement) -> list[Tip]:
    measured, tips = {cell.name for cell in measurement.right}, list[Tip]()
    for size, cell in measurement.best.items():
        found = better_levels(cell)
        if found is None or found[0].label in measured:
            continue
        spec, gain = found
        levels = len(cell.acceptance_by_depth)
        shares = [share for share in cell.acceptance_by_depth if share is not None]
        said = f"of those that reach the last of {levels} levels {shares[-1]:.0%} are accepted"
        why = f"predicted to be {gain:.2f} times as fast as {cell.name} at batch {size}: {said}"
        tips.append(Tip(f"--spec {spec.label}", why))
        measured.add(spec.label)
    return tips


def better_levels(cell: Cell) -> tuple[SpecConfig, float] | None:
    """Another number of levels, and how many times as fast as the cell's own it is predicted to be; None if none is worth it.

    The same acceptance by depth, and after the last depth that of the last one if enough rounds reached it; a draft pass a
    level; the other phases as they are.
    """
    levels, topk, nodes, *deeper = cell.spec
    shares = cell.acceptance_by_depth
    phases = cell.speculative.phases
    if (
        not isinstance(levels, int)
        or not isinstance(topk, int)
        or not isinstance(nodes, int)
        or deeper
        or len(shares) != levels
        or None in shares
        or not phases.rounds
    ):
        return None
    known = [share for share in shares if share is not None]
    further = FURTHER if cell.speculative.counters.reached_by_depth[-1] >= MIN_REACHED else 0
    lengths = [1.0, *(1 + each for each in accumulate(accumulate([*known, *[known[-1]] * further], mul)))]
    a_level = phases.ms("draft") / max(1, levels - 1)

    def speed(count: int) -> float:
        return lengths[count] / max(1e-9, phases.ms_per_round + a_level * (count - levels))

    gain, count = max((speed(count) / speed(levels), -count) for count in range(1, min(len(lengths), MAX_STEPS + 1)))
    if gain < WORTH:
        return None
    count = -count
    return SpecConfig(count, topk, count + 1 if topk == 1 else min(nodes, 1 + topk + topk * topk * (count - 1))), gain


def _noise(measurement: Measurement) -> list[Tip]:
    """About speed-ups that another run may not show."""
    right = measurement.right
    if cold := [cell for cell in right if cell.baseline.cold_timed or cell.speculative.cold_timed]:
        at = f"at batch {cold[0].batch_size} with {cold[0].name}"
        return [Tip("--repeats 5", f"kernels were compiled or graphs captured in passes that were timed {at}")]
    noisy = [cell for cell in right if len(cell.speed_ups) > 1 and max(cell.speed_ups) > NOISY * min(cell.speed_ups)]
    ranges = {size: measurement.baselines(size) for size in dict.fromkeys(cell.batch_size for cell in right)}
    apart = {size: rates for size, rates in ranges.items() if max(rates) > NOISY * min(rates)}
    sides = [side for cell in right for side in (cell.baseline, cell.speculative)]
    short = min((seconds for side in sides for seconds in side.seconds), default=SHORT_SECONDS)
    if not noisy and not apart and short >= SHORT_SECONDS:
        return []
    said = []
    if noisy:
        low, high = min(noisy[0].speed_ups), max(noisy[0].speed_ups)
        said.append(f"single repeats gave {low:.2f}x to {high:.2f}x at batch {noisy[0].batch_size} with {noisy[0].name}")
    elif apart:
        size, rates = next(iter(apart.items()))
        said.append(f"plain decoding alone gave {min(rates):.0f} to {max(rates):.0f} tok/s at batch {size}, which is noise")
    if short < SHORT_SECONDS:
        said.append(f"a pass was over after {short:.2f} s")
        return [Tip("a larger --num-prompts or --max-tokens, or --repeats 5", "; ".join(said))]
    return [Tip("--repeats 5 on a quieter machine", "; ".join(said))]


def _texts(right: list[Cell]) -> list[Tip]:
    for cell in right:
        if cell.repeat_ratio > REPEAT_FLAG and not cell.outputs.is_synthetic:
            said = f"texts repeat themselves ({cell.repeat_ratio:.0%} of n-grams), which inflates acceptance"
            return [Tip("other --prompts, or --temperature", said)]
    return []


def _chain(measurement: Measurement) -> list[Tip]:
    specs = {cell.spec for cell in measurement.cells}
    is_forced = measurement.synthetic_acceptance is not None  # for the levels that there are
    if measurement.settings["device"] != "cpu" or not specs or is_forced or any(spec[1] == 1 for spec in specs):
        return []
    return [Tip(f"--spec {CHAIN.label}", "on a CPU every node of a tree costs time, and a chain has the fewest")]


def _profile(measurement: Measurement) -> list[Tip]:
    if not measurement.right or measurement.budgets or any(cell.spec[0] == "auto" for cell in measurement.cells):
        return []
    return [Tip("--profile", "it shows where each millisecond of a round goes, beside the least that is possible")]
