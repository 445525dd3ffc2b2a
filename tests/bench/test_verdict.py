"""The screen after a benchmark: a verdict that is the numbers' own, one table, what to try next, all within 80 x 40."""

from __future__ import annotations

import argparse
import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from toolkit.bench import GREEDY, StubSession, cell_of, measured

from specdec.bench.cell import measure_plain
from specdec.bench.measurement import Cell, Failure, Measurement, Phases
from specdec.bench.show.advice import WORTH, advice, better_levels
from specdec.bench.show.report import print_report
from specdec.bench.show.verdict import verdict
from specdec.cli.bench import add_flags
from specdec.cli.flags import tree_shape

SHAPES = ((5, 4, 16), (5, 1, 6), (3, 1, 4))
LONG = "/home/somebody/models/a-publisher/A-Model-With-A-Long-Name-Instruct-2511-bf16"


def screen(measurement: Measurement, width: int = 80, **more: bool) -> str:
    out = io.StringIO()
    print_report(measurement, Console(file=out, width=width), **more)
    return out.getvalue()


def faster(by: float, batch_size: int = 1, spec: tuple[int | str, int, int] = (5, 4, 16), **stub: object) -> Cell:
    """A cell of three quiet repeats."""
    return replace(cell_of(([2.0] * 3, [2.0 / by] * 3), **stub), batch_size=batch_size, spec=spec)


def every_kind() -> dict[str, Measurement]:
    cells = [faster(2 - 0.1 * i, size, spec) for size in (1, 8) for i, spec in enumerate(SHAPES)]
    slow = [faster(0.5 + 0.1 * i, size, spec) for size in (1, 8) for i, spec in enumerate(SHAPES)]
    wrong = [faster(2, size, spec, wrong=[5, 6, 1, 8, 5, 6]) for size in (1, 8) for spec in SHAPES]
    forced = [replace(cell, outputs=replace(cell.outputs, is_synthetic=True)) for cell in slow]
    empty = [faster(2, size, spec, text="") for size in (1, 8) for spec in SHAPES]
    noisy = [
        replace(cell_of(([2.0, 3.0, 2.0], [2.0, 2.0, 2.9])), batch_size=size, spec=spec) for size in (1, 8) for spec in SHAPES
    ]
    failure = Failure(8, (5, 4, 16), "RuntimeError: CUDA out of memory. " + "Tried to allocate 2.00 GiB. " * 30)
    plain = [replace(measure_plain(StubSession(), [[1, 2], [3]], GREEDY, 3), batch_size=size) for size in (1, 8)]
    found = {
        "faster": measured(*cells),
        "slower": measured(*slow),
        "n-grams": measured(*slow),
        "wrong": measured(*wrong, *[]),
        "forced": measured(*forced, synthetic_acceptance=[0.8, 0.7, 0.6, 0.5, 0.4]),
        "empty": measured(*empty),
        "noisy": measured(*noisy),
        "failed": measured(*cells[:3], failures=[failure] * 3),
        "repetitive": measured(*(replace(cell, repeat_ratio=0.9) for cell in noisy)),
        "plain": measured(plain_cells=plain),
        "nothing": measured(),
    }
    for name, measurement in found.items():
        draft = {"n-grams": "ngram", "plain": None}.get(name, LONG + "-EAGLE3")
        measurement.settings.update(target=LONG, draft=draft, dtype="bfloat16")
        measurement.machine["runs_on"] = "NVIDIA H200 141GB HBM3e, 16 CPU threads"
    return found


KINDS = list(every_kind())


@pytest.mark.parametrize("kind", KINDS)
def test_a_benchmark_ends_in_one_screen(kind: str) -> None:
    """Keeps out: a table "why the speed-up is not the predicted one" and 30 lines of glossary in minute one."""
    measurement = every_kind()[kind]
    text = screen(measurement)
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80 and "…" not in text, (len(lines), text)
    cells = [line for line in lines if re.match(r"\s+[18]\s+\d,\d,\d+\s", line)]
    assert len(cells) == len(measurement.cells), "one table, a line for each cell"
    for title in ("Milliseconds by phase", "Why the speed-up", "What the words mean", "Memory (peak"):
        assert title not in text
    wide = screen(measurement, 200)
    assert [line.split() for line in wide.splitlines() if re.match(r"\s+[18]\s+\d,\d", line)] == [row.split() for row in cells]
    narrow = screen(measurement, 60)
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= 60 and "…" not in narrow
    assert {word for row in cells for word in row.split()} <= set(narrow.replace(", ", " ").split())


@pytest.mark.parametrize("kind", KINDS)
def test_details_and_words_come_on_demand(kind: str) -> None:
    """Keeps out: numbers that can't be reached any more, and a glossary that hides the numbers."""
    measurement = every_kind()[kind]
    plain, details, words = (screen(measurement, 120, **more) for more in ({}, {"details": True}, {"explain": True}))
    if measurement.cells:
        for title in ("Speed", "Milliseconds by phase", "Acceptance by depth", "averaged in two ways", "Memory (peak"):
            assert title in details
        assert "over tokens" in details and "over requests" in details
    assert "sha256 of the ids" in details and "sha256" not in plain
    assert "What the words mean" in words and "What the words mean" not in details
    assert details.startswith(plain.split("\n\n")[0]) and words.startswith(plain.split("\n\n")[0]), "the verdict comes first"
    assert ("--details" in plain, "--details:" in details) == (True, False) and "--explain:" in plain


def test_the_verdict_is_the_numbers() -> None:
    """Keeps out: a verdict about another row than the fastest, or with a number that the table does not have."""
    measurement = every_kind()["faster"]
    lines = [line.plain for line in verdict(measurement)]
    assert lines == [
        "2.00x faster than plain decoding at batch 1 with 5,4,16",
        "2.00x faster than plain decoding at batch 8 with 5,4,16",
    ]
    swapped = replace(measurement, cells=[faster(1.25, 1), faster(1.5, 1, (5, 1, 6)), faster(3, 4)])
    assert [line.plain for line in verdict(swapped)] == [
        "1.50x faster than plain decoding at batch 1 with 5,1,6",
        "3.00x faster than plain decoding at batch 4 with 5,4,16",
    ]
    for cell in swapped.cells:
        assert f"{cell.speed_up:.2f}x" in screen(swapped)


def test_what_is_slower_is_said_of_every_row() -> None:
    """Keeps out: a slow row beside a fast one, of which only a column says so."""
    mixed = measured(faster(2), faster(0.75, 1, (5, 1, 6)), faster(0.5, 8))
    text = " ".join(screen(mixed).split())
    assert "2.00x faster than plain decoding at batch 1 with 5,4,16" in text
    assert "SLOWER THAN BASELINE at batch 8: 0.50x with 5,4,16, the best of 2 shapes" in text
    assert "SLOWER THAN BASELINE: batch 1 with 5,1,6 (0.75x)" in text and text.count("SLOWER") == 2
    assert "SLOWER" not in screen(every_kind()["faster"])


def test_wrong_texts_are_the_loudest() -> None:
    """Keeps out: a speed-up above the news that texts differ, or a speed-up of the rows in which they do."""
    measurement = measured(faster(2), faster(3, 8, wrong=[5, 6, 1, 8, 5, 6]))
    lines = verdict(measurement)
    assert lines[0].plain.startswith("OUTPUTS DIFFER by more than rounding at batch 8 with 5,4,16 (0 of 2 equal)")
    assert "red" in str(lines[0].style) and [line.plain for line in lines[1:]] == [
        "2.00x faster than plain decoding at batch 1 with 5,4,16"
    ]
    assert "specdec verify" in screen(measurement) and "3.00x" not in screen(measurement)
    failed = verdict(every_kind()["failed"])
    assert failed[0].plain.startswith("FAILED: batch 8, 5,4,16: RuntimeError: CUDA out of memory")
    assert verdict(every_kind()["empty"])[0].plain.startswith("EMPTY at batch 1 with 5,4,16; ")
    assert verdict(measured())[0].plain == "Nothing was measured"


def test_forced_acceptance_is_marked_in_every_line() -> None:
    """Keeps out: a plan that is read as a measurement, and advice about shapes that can't be compared."""
    measurement = every_kind()["forced"]
    assert all(line.plain.startswith("SYNTHETIC: ") for line in verdict(measurement))
    text = screen(measurement)
    assert text.count("SYNTHETIC") >= len(verdict(measurement)) + len(measurement.cells)
    assert not any(tip.what.startswith(("--spec 5", "--spec 6", "--spec 8")) for tip in advice(measurement))


def test_noise_is_no_speed_up() -> None:
    """Keeps out: "1.03x faster" from repeats between 0.7x and 1.5x, or from a single one where baselines differ by as much."""
    (line, *_) = verdict(every_kind()["noisy"])
    assert line.plain == "No faster than plain decoding at batch 1 with 5,4,16: 1.00x, within the noise of 0.69x to 1.50x"

    def once(plain: float, fast: float, spec: tuple[int, int, int]) -> Cell:
        cell = faster(1, spec=spec)
        sides = {"baseline": plain, "speculative": fast}
        return replace(cell, **{k: replace(getattr(cell, k), seconds=[v], output_tokens=[12]) for k, v in sides.items()})

    single = measured(once(2.0, 1.9, (5, 4, 16)), once(2.4, 2.4, (5, 1, 6)))
    assert single.baselines(1) == pytest.approx([6.0, 5.0]) and single.noise(single.cells[0]) == pytest.approx(
        (0.877, 1.263), abs=1e-3
    )
    assert "within the noise of 0.88x to 1.26x" in verdict(single)[0].plain
    assert measured(single.cells[0]).noise(single.cells[0]) is None, "one baseline says nothing of noise"
    tips = " ".join(tip.why for tip in advice(single))
    assert "plain decoding alone gave 5 to 6 tok/s at batch 1, which is noise" in tips


def test_a_timed_pass_that_was_not_warm_is_named() -> None:
    """Keeps out: seconds of compilations in a baseline that then looks slow, which only the JSON tells."""
    cell = faster(2)
    cold = measured(replace(cell, baseline=replace(cell.baseline, cold=7, cold_timed=2)))
    assert "compiled or graphs captured in passes that were timed at batch 1 with 5,4,16" in " ".join(screen(cold).split())
    assert "2 of the timed passes compiled kernels or captured graphs" in screen(cold, details=True)
    assert "compiled" not in screen(measured(cell), details=True)


def test_slow_n_grams_are_told_from_a_slow_head() -> None:
    """Keeps out: n-gram trees slower than plain decoding, and no word of what to do about it."""
    kinds = every_kind()
    (first, second, *_) = advice(kinds["n-grams"])
    assert first.what == "no --draft, or --draft DIR with a trained head"
    assert first.why.startswith("n-gram chains and trees are slower than plain decoding at batch 1, 8")
    assert second.what == "--spec auto,4,16"
    assert advice(kinds["slower"])[0].what == "no --draft, or a better head"
    assert not any("no --draft" in tip.what for kind in ("faster", "noisy") for tip in advice(kinds[kind]))
    on_cpu = measured(faster(0.5), faster(0.5, 8))
    assert "--spec 5,1,6" in [tip.what for tip in advice(on_cpu)]
    on_cpu.settings["device"] = "cuda:0"
    assert "--spec 5,1,6" not in [tip.what for tip in advice(on_cpu)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_advised_can_be_typed(kind: str) -> None:
    """Keeps out: a shape that the command line refuses, a flag that it does not have, and advice to do what was just done."""
    measurement = every_kind()[kind]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    done = {cell.name for cell in measurement.cells}
    for tip in advice(measurement):
        assert set(re.findall(r"--[a-z][a-z-]*", f"{tip.what} {tip.why}")) <= known
        for shape in re.findall(r"--spec (\S+)", tip.what):
            assert tree_shape(shape).label not in done
    assert len(screen(measurement).split("What to try next")) == 1 + bool(advice(measurement))


@pytest.mark.parametrize(
    ("shares", "draft_ms", "levels"),
    [([0.9, 0.9, 0.1], 1.0, 2), ([0.9, 0.1, 0.1], 6.0, 1), ([0.9, 0.9, 0.9], 0.1, 6), ([0.8, 0.5, 0.4], 0.5, None)],
)
@pytest.mark.parametrize("topk", [1, 3])
def test_better_levels_are_those_of_brute_force(shares: list[float], draft_ms: float, levels: int | None, topk: int) -> None:
    """Keeps out: advice for more levels where acceptance has ended, and none where the tree is cut off too early."""
    cell, reached = faster(1.5, spec=(3, topk, 4 if topk == 1 else 12)), [1000.0]
    for share in shares:
        reached.append(reached[-1] * share)
    counts = [round(count) for count in reached]
    stats = replace(cell.speculative.counters, reached_by_depth=counts[:-1], accepted_by_depth=counts[1:])
    seconds = {"draft": 2 * draft_ms / 1e3, "verify": 0.008}
    phases = Phases(sum(seconds.values()), seconds, {"draft": 1, "verify": 1})
    cell = replace(cell, speculative=replace(cell.speculative, counters=stats, phases=phases))
    found = better_levels(cell)

    def speed(count: int) -> float:
        tokens = share = 1.0
        for depth in range(count):
            share *= shares[min(depth, 2)]
            tokens += share
        return tokens / (8 + draft_ms * (count - 1))

    best = max(range(1, 7), key=speed)
    assert (None if speed(best) < WORTH * speed(3) else best) == levels
    if levels is None:
        assert found is None
    else:
        assert found is not None and (found[0].num_steps, found[0].topk) == (levels, topk)
        assert found[1] == pytest.approx(speed(levels) / speed(3), rel=0.01)


def test_nothing_is_predicted_of_what_is_not_known() -> None:
    """Keeps out: a crash, or a guess, where depths were hardly reached or the shape changes from round to round."""
    for reached, levels in ((20, 5), (19, None)):
        sure = faster(1.5, spec=(2, 1, 3))
        stats = replace(sure.speculative.counters, reached_by_depth=[reached] * 2, accepted_by_depth=[reached] * 2)
        found = better_levels(replace(sure, speculative=replace(sure.speculative, counters=stats)))
        assert (found and found[0].num_steps) == levels
    cell = faster(1.5)  # its counters know two levels, and its shape five
    assert better_levels(cell) is None
    assert better_levels(replace(cell, spec=("auto", 2, 6))) is None


def test_what_the_table_shows_as_equal_is_no_verdict() -> None:
    """Keeps out: "SLOWER THAN BASELINE: 1.00x" over a row of two equal speeds, and "faster" where no draft was accepted."""
    (line, *_) = verdict(measured(faster(0.998)))
    assert line.plain.startswith("No faster than plain decoding at batch 1 with 5,4,16: 1.00x")
    cell = faster(1)
    once = {side: replace(getattr(cell, side), seconds=[2.0], output_tokens=[12]) for side in ("baseline", "speculative")}
    (line, *_) = verdict(measured(replace(cell, **once)))
    assert line.plain == "As fast as plain decoding at batch 1 with 5,4,16"
    cell = faster(1.08)
    none = replace(cell.speculative.counters, accepted=0)
    cell = replace(cell, speculative=replace(cell.speculative, counters=none))
    (line, *_) = verdict(measured(cell))
    assert line.plain == "No faster than plain decoding at batch 1 with 5,4,16: no draft was accepted, so 1.08x is noise"
