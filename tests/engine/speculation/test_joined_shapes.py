"""SpecConfig("auto") with several sources, in simulated time: shapes with room for paths, and what paths are worth."""

import random

import pytest
from toolkit.inside.simulated import MatchedText, SimulatedDevice, best_rate, plain_cost

from specdec import SpecConfig
from specdec.engine.control.acceptance import Acceptance
from specdec.engine.control.path_rates import PathRates, matched
from specdec.engine.speculation import Speculation
from specdec.steps import Needs

AUTO = SpecConfig("auto", 4, 16).joined
TEXTS = [
    MatchedText(0.7, 0.3),  # no match is ever right
    MatchedText(0.6, 0.3, first=0.5, goes_on=0.95),
    MatchedText(0.2, 0.0, first=0.95, goes_on=0.97),  # a copy, of which the drafter knows nothing
    MatchedText(0.8, 0.5, first=0.3, goes_on=0.6),
]


@pytest.mark.parametrize(
    "spec", [SpecConfig("auto", 4, 16), SpecConfig("auto", 1, 5), SpecConfig("auto", 8, 100), SpecConfig("auto", 1)], ids=str
)
@pytest.mark.parametrize("depth", [None, 1, 4])
def test_what_auto_chooses_from_with_several_sources(spec: SpecConfig, depth: int | None) -> None:
    """Keeps out: depths that the nodes can't fill, more look-ahead than was kept, a shape that is there twice."""
    auto = spec.joined if depth is None else SpecConfig("auto", spec.topk, spec.num_draft_tokens, depth)
    assert auto.of_drafter == spec and auto.joined == auto and auto.is_auto
    own = [shape.of_drafter for shape in auto.shapes]
    assert {*spec.shapes} <= {*own} and len({*auto.shapes}) == len(auto.shapes)
    for shape in auto.shapes:
        assert shape.max_depth is not None and not shape.is_chain and shape.levels <= auto.levels
        assert shape.levels == max(shape.max_steps, min(shape.num_draft_tokens - 1, auto.max_depth or 0))
        assert shape.num_draft_tokens <= auto.num_draft_tokens and shape.lookahead <= auto.lookahead
    with pytest.raises(ValueError, match=rf"max_depth must be in \[1, {min(64, spec.num_draft_tokens - 1)}\], got 0"):
        SpecConfig("auto", spec.topk, spec.num_draft_tokens, 0)


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize("text", TEXTS, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_within_eight_percent_of_the_best_fixed_shape(text: MatchedText, rows: int) -> None:
    """Keeps out: trees judged by their drafter's levels alone, so that room for paths is never given, or given for nothing."""
    made = SimulatedDevice(Speculation(AUTO.shapes, is_auto=True))
    made.run(rows, 300, text)
    assert made.run(rows, 300, text) > 0.92 * best_rate(rows, text, AUTO.shapes)


def test_matches_that_come_are_found_and_those_that_end_are_given_up() -> None:
    """Keeps out: paths that are never looked for again once the drafter alone was worth more."""
    made = SimulatedDevice(Speculation(AUTO.shapes, is_auto=True))
    for text in (TEXTS[0], TEXTS[2], MatchedText(0.0), TEXTS[2]):
        made.run(1, 1200, text)
        rate = made.run(1, 200, text)
        best = best_rate(1, text, AUTO.shapes) if text.probability else 1 / (1.02 * plain_cost(1))
        assert rate > 0.93 * best, text


def test_predictions_are_judged_by_themselves() -> None:
    """Keeps out: what other sources are worth, taken for what a prediction is, as requests with one come between others."""
    made, needs = SimulatedDevice(Speculation(AUTO.shapes, is_auto=True)), Needs.of("prediction")
    made.run(1, 900, TEXTS[0])
    controller = made.speculation.controller
    assert controller is not None and not controller.of_predicted.reached[0]
    before = controller.acceptance.accept_lengths(AUTO.shapes)
    made.needs = needs
    made.run(1, 100, TEXTS[2])
    assert made.run(1, 200, TEXTS[2]) > 0.9 * best_rate(1, TEXTS[2], AUTO.shapes)
    assert controller.acceptance.accept_lengths(AUTO.shapes) == pytest.approx(before, rel=0.03), "but for rounds on their way"
    assert "1 row with predictions: " in " ".join(made.speculation.reasons())


@pytest.mark.parametrize("stay", [1, 8])
@pytest.mark.parametrize("text", [TEXTS[2], TEXTS[1], MatchedText(0.0)], ids=str)
def test_a_batch_that_drains_learns_no_size_anew(text: MatchedText, stay: int) -> None:
    """Nothing is captured, so that each number of rows is a size.  Keeps out: rounds of no levels at every size that a batch
    passes as its rows end, only to be measured, while a prediction is copied ten tokens a round; and a size of which one round
    ran, whose cost did not count, taken for one that tells costs."""
    made = SimulatedDevice(Speculation(AUTO.shapes, is_auto=True))
    made.run(8, 300, text)
    reached = best = 0.0
    for rows in [*range(7, 0, -1)] * (56 // 7 // stay):
        before, most = made.seconds, max(best_rate(rows, text, AUTO.shapes), rows / (1.03 * plain_cost(rows)))
        reached += made.run(rows, stay, text) * (made.seconds - before)
        best += most * (made.seconds - before)
    assert reached > 0.93 * best
    assert None not in made.shapes[-56:] if text.probability else made.shapes[-56:].count(None) > 50


def test_rates_are_those_of_paths() -> None:
    """Keeps out: a path that ended with the tree's room taken for one that was wrong there."""
    rng, text, shape, matches = (
        random.Random(0),
        MatchedText(0.1, first=0.6, goes_on=0.9),
        SpecConfig(1, 1, 5, 4),
        PathRates(15),
    )
    for _ in range(2000):
        matches.observe(shape, [text.draw(shape, rng)[2] for _ in range(2)])
    first, *later = matches.rates(4)
    assert first == pytest.approx(0.6, abs=0.06) and later == pytest.approx([0.9] * 3, abs=0.06)
    matches.observe(SpecConfig(4, 1, 5, 4), [0] * 500)
    assert 0.3 < matches.rates(1)[0] < first, "such a tree may have had no path, and what is known grows old"
    assert matches.reached[4:] == [0.0] * 11 and 0.7 < matches.rates(15)[-1] < 0.95
    assert [matched(bits) for bits in ([], [1], [2, 3], [6, 2, 1, 2], [0, 2])] == [0, 0, 2, 2, 0]
    acceptance = Acceptance(10, depths=15)
    alone, deeper = acceptance.accept_lengths([SpecConfig(3, 1), SpecConfig(3, 1, 4, 3)])
    assert alone < deeper < alone + 0.35
