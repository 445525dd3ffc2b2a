"""What the benchmark shows when it has run: tables of any width, words that are explained, a plot."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console
from toolkit.bench import GREEDY, PROMPTS, StubSession, cell_of, measured, traced

from specdec.bench.cell import measure_cell
from specdec.bench.measurement import Failure, Measurement, Phases
from specdec.bench.show import plots
from specdec.bench.show.legend import terms_of
from specdec.bench.show.report import print_report
from specdec.generation import Stats

NUMBER = re.compile(r"\d[\d.,]*\d|\d")


def shown(measurement: Measurement, width: int = 80) -> str:
    out = io.StringIO()
    print_report(measurement, Console(file=out, width=width), details=True, explain=True)
    return out.getvalue()


def everything() -> Measurement:
    """A measurement in which every table and every kind of line occurs."""
    wide = replace(cell_of(), spec=(64, 64, 1024), batch_size=4096)
    stats = replace(wide.speculative.counters, reached_by_depth=[99] * 12, accepted_by_depth=[55] * 12)
    wide = replace(wide, speculative=replace(wide.speculative, counters=stats))
    budgets = [traced(spec=None, phases_ms={"decode": 5.0, "rest": 0.5}), traced()]
    failures = [Failure(7, (5, 4, 16), "RuntimeError: the request failed while it ran")]
    return measured(wide, cell_of(), cell_of(wrong=[5, 6, 1, 8, 5, 6]), budgets=budgets, failures=failures)


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_synthetic", [False, True])
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_every_number_is_there_and_whole_at_any_width(width: int, is_synthetic: bool) -> None:
    """Keeps out: tables that are cut with dots or wrap inside a number where the terminal is narrow."""
    measurement = everything()
    if is_synthetic:
        cells = [replace(cell, outputs=replace(cell.outputs, is_synthetic=True)) for cell in measurement.cells]
        measurement = replace(measurement, cells=cells, synthetic_acceptance=[0.8, 0.5])
    whole, text = shown(measurement, 500), shown(measurement, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width and "…" not in text
    missing = Counter(NUMBER.findall(whole)) - Counter(NUMBER.findall(text))
    assert not missing, missing
    assert {"4096", "64,64,1024", "32,768", "75.0%", "15.0"} <= {*re.findall(r"[\d.,]+\d%?", text)}


def test_a_block_names_every_number() -> None:
    """Keeps out: a narrow layout whose numbers have lost their column's name, and lines for cells that are empty."""
    lines = [line.strip() for line in shown(measured(cell_of(), budgets=[traced()]), 40).splitlines()]
    speed = lines[lines.index("Speed") :]
    assert speed[1:4] == ["batch 2, S,k,nd 2,2,4", "accept length: 3.00", "baseline tok/s: 4.8"]
    part = lines[lines.index("verify") :]
    assert part[1:6] == ["ms: 6.00", "share: 69.8%", "limit ms: 5.04", "x limit: 1.19", "extend"]
    assert part[6:9] == ["ms: 0.400", "share: 4.7%", "limit ms: 0.247"]


def test_every_column_is_explained() -> None:
    """Keeps out: S, k, nd, rest, plain step, SYNTHETIC, near-tie and the like, which nothing on the screen explains."""
    measurement = everything()
    terms = {word for term, _ in terms_of(measurement) for word in term.replace(",", "").split()}
    columns = """S k nd batch accept length baseline speed-up predicted plain step whole round draft verify extend rest prefill
        KV pool repeated limit x idle GPU phases uneven ends other equal DIVERGED rank bound""".split()
    assert set(columns) <= terms, set(columns) - terms
    text = shown(measurement).split("What the words mean")[1]
    assert all(re.search(rf"^{re.escape(term)}\s", text, re.MULTILINE) for term, _ in terms_of(measurement))


def test_only_words_that_occur_are_explained() -> None:
    """Keeps out: a page of definitions under a report of two tables."""
    terms = {term for term, _ in terms_of(measured(cell_of()))}
    assert "equal" in terms and not terms & {"SYNTHETIC", "near-tie", "DIVERGED", "EMPTY", "decode", "GPU", "limit ms", "rank"}
    forced = measured(cell_of(synthetic=True), synthetic_acceptance=[1.0, 1.0])
    assert "SYNTHETIC" in {term for term, _ in terms_of(forced)}
    assert terms_of(measured()) == []


def test_the_reasons_turn_the_prediction_into_the_measurement() -> None:
    """Keeps out: a predicted speed-up of 3.65x beside a measured one of 2.13x, and no word about why."""
    cell = cell_of()
    assert cell.predicted_speed_up == pytest.approx(3 * 10 / 10)
    factors = cell.speed_up_factors
    assert factors.uneven_ends == pytest.approx((5 / 2) / 3), "five steps against two rounds of three tokens"
    assert factors.prefill == pytest.approx((62 / 35) / (50 / 20))
    assert factors.other == pytest.approx(cell.speed_up / (62 / 35))
    assert cell.predicted_speed_up * factors.uneven_ends * factors.prefill * factors.other == pytest.approx(cell.speed_up)
    table = shown(measured(cell)).split("Why the speed-up is not the predicted one")[1].split("\n\n")[0]
    assert table.splitlines()[-1].split() == "2 2,2,4 3.00x x 0.83 x 0.71 x 1.76 3.12x".split()
    derived = measured(cell).as_json()["cells"][0]["derived"]
    assert derived["speed_up_factors"] == factors._asdict()
    chosen = replace(cell, spec=("auto", 4, 16))  # the pass that times phases runs other rounds than the repeats
    assert chosen.predicted_speed_up is None and chosen.speed_up_factors is None and "3.00x" not in shown(measured(chosen))
    wrong = cell_of(wrong=[5, 6, 1, 8, 5, 6])
    assert wrong.speed_up_factors is None and "Why the speed-up" not in shown(measured(wrong))


@pytest.mark.parametrize(
    ("stub", "verdict"),
    [
        ({"text": ""}, "EMPTY"),  # tokens that show as nothing, as from NaN logits
        ({"right": [1], "text": "", "reason": "eos"}, "EMPTY"),
        ({"right": [1], "reason": "eos"}, "EMPTY"),
        ({"right": []}, "EMPTY"),
        ({"right": [1], "text": "a"}, "equal"),
        ({"right": [1]}, "equal"),
        ({"text": "", "synthetic": True}, "EMPTY"),
        ({"text": "", "wrong": [5, 6, 1]}, "DIVERGED"),
    ],
)
def test_empty_outputs_are_no_success(stub: dict[str, object], verdict: str) -> None:
    """Keeps out: a target with NaN weights that benches as "2.04x, equal, exit code 0", since nothing equals nothing."""
    measurement = measured(measure_cell(StubSession(**stub), PROMPTS, GREEDY, 2))
    (cell,), text = measurement.cells, " ".join(shown(measurement).split())
    assert cell.outputs.verdict == verdict
    assert measurement.diverged == (cell.speed_up is None) == (verdict != "equal")
    assert ("2 of 2 outputs are empty (prompt 1, 2)" in text) == ("text" in stub and not stub["text"] or verdict == "EMPTY")
    if verdict == "EMPTY":
        assert measurement.as_json()["cells"][0]["outputs"]["empty"] == [0, 1]
        assert cell.outputs.num_equal in (0, None)


def test_a_cell_that_failed_is_named_and_no_success() -> None:
    """Keeps out: exit code 0 for a run in which a request failed, and a report that dies because it has no cell."""
    measurement = measured(failures=[Failure(8, (5, 4, 16), "RuntimeError: a request failed: logits are not finite")])
    text = " ".join(shown(measurement).split())
    assert "batch 8, 5,4,16: FAILED: RuntimeError: a request failed: logits are not finite" in text
    assert measurement.diverged and measurement.as_json()["failures"][0]["batch_size"] == 8
    assert "FAILED" in plots.draw(measurement).get_suptitle()


def test_the_plot_shows_counts_and_spread() -> None:
    """Keeps out: bars from one lucky repeat that look like many, and a figure that doesn't say how much was measured."""
    cell = cell_of()
    figure = plots.draw(measured(cell, replace(cell, batch_size=1)))
    title, (left, _, right, _) = " ".join(figure.get_suptitle().split()), figure.axes
    assert "17 prompts, at most 9 output tokens each, greedy; 3 timed repeats" in title and "whiskers" in title
    assert "36 output tokens timed a bar" in left.get_xlabel()
    spreads = [
        container.errorbar.lines[2][0].get_segments()[0] for container in left.containers if hasattr(container, "errorbar")
    ]
    lows, highs = ([segment[i][1] for segment in spreads if segment is not None] for i in (0, 1))
    for rates in (cell.baseline.rates, cell.speculative.rates):
        assert min(rates) in lows and max(rates) in highs
    assert [text.get_text() for text in left.texts] == ["3.12x", "3.12x"]
    assert right.get_legend().get_texts()[0].get_text() == "2,2,4: accept length 3.00 over 12 rounds"
    bad = plots.draw(measured(cell_of(wrong=[5, 6, 1, 8, 5, 6]))).axes[0]
    assert [text.get_text() for text in bad.texts] == ["outputs\ndiffer"]


def test_the_plot_says_which_baseline_is_noise_and_shows_phases() -> None:
    """Keeps out: two grey bars for one thing, of which nobody knows why they differ; and a round that is one number."""
    first, second = cell_of(), replace(cell_of(([3.0, 2.4, 2.0], [1.0, 0.5, 0.8])), spec=(1, 1, 2))
    speed, phases, *_ = plots.draw(measured(first, second)).axes
    rates = [*first.baseline.rates, *second.baseline.rates]
    (band,) = (each for each in speed.collections if each.get_label().startswith("noise: all passes of plain decoding"))
    heights = [y for _, y in band.get_paths()[0].vertices]
    assert (min(heights), max(heights)) == pytest.approx((min(rates), max(rates)))
    labels = [text.get_text() for text in speed.get_legend().get_texts()]
    assert "plain decoding, measured again for each shape" in labels and len(labels) == 4
    assert [text.get_text() for text in phases.get_xticklabels()] == ["plain, batch 2", "2,2,4, batch 2", "1,1,2, batch 2"]
    heights = [bar.get_height() for bar in phases.patches]
    assert heights == pytest.approx([10.0, *[2.0, 6.0, 1.5, 0.5] * 2]), "a step, then draft, verify, extend and the rest"
    assert [bar.get_y() for bar in phases.patches] == pytest.approx([0, *[0, 2.0, 8.0, 9.5] * 2]), "one on the other"
    assert {text.get_text() for text in phases.get_legend().get_texts()} == {"plain step", "draft", "verify", "extend", "rest"}
    alone = plots.draw(measured(replace(first, baseline=replace(first.baseline, seconds=[2.0], output_tokens=[12])))).axes[0]
    assert not any("noise" in str(each.get_label()) for each in alone.collections), (
        "one pass of plain decoding says nothing of noise"
    )


def test_one_repeat_has_no_spread() -> None:
    """Keeps out: whiskers of no length that look like perfect agreement."""
    cell = measure_cell(StubSession(), PROMPTS, GREEDY, 1)
    measurement = measured(cell)
    measurement.settings["repeats"] = 1
    figure = plots.draw(measurement)
    assert "1 timed repeat" in figure.get_suptitle() and "whiskers" not in figure.get_suptitle()
    assert not any(getattr(container, "errorbar", None) for container in figure.axes[0].containers)


def test_rounds_of_nobody_are_no_division_by_zero() -> None:
    """Keeps out: a crash in the report where every request ended with its first token."""
    cell = cell_of()
    phases = Phases(0.01, {"prefill": 0.01}, {"prefill": 1})
    idle = replace(cell.speculative, phases=phases, counters=Stats(prefill_tokens=6))
    cell = replace(cell, speculative=idle)
    assert cell.predicted_speed_up is None and cell.speed_up_factors is None and "What the words mean" in shown(measured(cell))
