"""SpecConfig("auto") in simulated time on a CPU: nothing is tried on the side, and other programs may run beside it."""

import re

import pytest
from toolkit.inside.simulated import Busy, SimulatedDevice, Text, on_cpu
from toolkit.paths import ROOT

from specdec import SpecConfig, SpecDecoder, shipped
from specdec.engine.control.acceptance import FIRST_GUESS
from specdec.engine.control.costs import Costs
from specdec.engine.speculation import Speculation
from specdec.loading.build import speculation

SHAPES = SpecConfig("auto", 4, 16).shapes


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_useless_head_costs_little_from_the_first_round_on(rows: int) -> None:
    """On a CPU, where no shape can be tried on the side and rounds of trees take twice and more of a plain round's time.
    Keeps out: a long chain and the widest tree run to be measured, though a short chain has shown
    that drafts are never right."""
    made = Busy(Speculation(SHAPES, is_auto=True), cost=on_cpu)
    made.run(rows, 300, Text(0.0))
    start = made.calm
    made.run(rows, 900, Text(0.0))
    assert start < 1.02 * 300 * on_cpu(rows, None)
    assert made.calm - start < 1.01 * 900 * on_cpu(rows, None)


@pytest.mark.slow_cases
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("text, least", [(Text(0.0), 0.97), (Text.of(1.3), 0.96), (Text.of(2), 0.94)])
def test_a_busy_machine_rules_no_shape_out(rows: int, text: Text, least: float) -> None:
    """Other programs make rounds up to four times as slow for a while; what counts is what the chosen shapes would take on a
    quiet machine.  Keeps out: a shape that was measured in a bad moment and is never tried again, and a slow moment of the
    shape that runs, after which all others look fast."""
    best = max(rows * text.accept_length(shape) / on_cpu(rows, shape) for shape in (None, *SHAPES))
    shares = []
    for seed in range(6):
        made = Busy(Speculation(SHAPES, is_auto=True), seed, cost=on_cpu, busy=0.3)
        made.run(rows, 300, text)
        tokens, calm = made.tokens, made.calm
        made.run(rows, 300, text)
        shares.append((made.tokens - tokens) / (made.calm - calm) / best)
    assert sum(shares) / len(shares) > least, shares


def test_less_work_costs_no_more() -> None:
    """Keeps out: a plain round that was measured while the machine was busy, and is taken to cost twice a chain's for good."""
    costs, (chain, longer) = Costs(first_counts=True), (SpecConfig(1, 1), SpecConfig(4, 1))
    for shape, seconds, rounds in ((None, 0.040, 3), (chain, 0.020, 30), (longer, 0.010, 3)):
        for _ in range(rounds):
            costs.observe(shape, seconds)
    assert [costs.of(shape) for shape in (None, chain, longer)] == pytest.approx([0.020] * 3)
    for _ in range(40):
        costs.observe(None, 0.021)
    assert costs.of(None) == pytest.approx(0.021, rel=0.01), "what has run more often is believed"


@pytest.mark.parametrize("shapes", [(SpecConfig(1, 1),), (SpecConfig(1, 1), SpecConfig(5, 1))])
def test_what_is_worth_no_more_than_plain_decoding_ends(shapes: tuple[SpecConfig, ...]) -> None:
    """Rounds of all shapes take as long, so a chain of which nothing is accepted emits just what plain decoding does.
    Keeps out: a chain that goes on because nothing else promises more, with a drafter's memory and power spent for nothing."""
    made = SimulatedDevice(Speculation(shapes, is_auto=True), cost=lambda rows, shape: 0.02, uneven=0.0)
    made.run(4, 60, Text.of(3))
    assert None not in made.shapes[-30:]
    made.run(4, 300, Text(0.0))
    assert made.shapes[-100:].count(None) >= 97, "but for looks"


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_looks_lose_no_more_than_the_page_says(rows: int) -> None:
    """Keeps out: looks that lose a larger share than docs/SETTINGS.md promises, from the change to plain decoding on, when
    they may lose the most, or later."""
    page = " ".join((ROOT / "docs/SETTINGS.md").read_text().split())
    found = re.search(r"looks lose at most ([\d.]+) % of the time, and half of that the longer they find nothing", page)
    assert found, "the page has other words"
    promised = float(found[1]) / 100
    made = SimulatedDevice(Speculation(SHAPES, is_auto=True), cost=on_cpu)
    made.run(rows, 100, Text(1.0))
    while made.round(rows, Text(0.0)) is not None:
        pass
    start, lost, looks = made.seconds, 0.0, 0
    for _ in range(3000):
        if (shape := made.round(rows, Text(0.0))) is not None:
            lost, looks = lost + on_cpu(rows, shape) - on_cpu(rows, None), looks + 1
            assert lost <= promised * (made.seconds - start)
    assert looks >= 3 and lost <= 0.55 * promised * (made.seconds - start)


def test_a_drafter_that_seems_useless_starts_plain_and_says_why() -> None:
    """Keeps out: rounds with drafts that a look at the head has shown to be worth nothing; and a drafter that is never asked
    again, though the look was along another kind of text."""
    useless = Speculation(SHAPES, is_auto=True, first_accepted=0.0)
    made = Busy(useless, cost=on_cpu)
    made.run(1, 32, Text(0.0))
    assert set(made.shapes) == {None}
    (reason,) = useless.reasons()
    assert reason.startswith("1 row: no levels with 1.00 tokens in ") and "by the look at the drafter" in reason
    made.run(1, 300, Text(0.0))
    assert set(made.shapes) != {None}
    assert made.calm < 1.01 * 332 * on_cpu(1, None)
    assert "by the look" not in useless.reasons()[0], "a round has drafted"
    made.run(1, 500, Text.of(3))
    assert None not in made.shapes[-50:]


@pytest.mark.parametrize("looks", [True, False])
def test_what_the_look_saw_is_the_first_guess(looks: bool) -> None:
    """Keeps out: a look whose number is lost between the loader and the controller."""
    pair = shipped.target_folder(), shipped.draft_folder()
    with SpecDecoder.from_pretrained(*pair, SpecConfig("auto", 4, 16), device="cpu", smoke=looks) as decoder:
        seen, controller = decoder.settings.first_accepted, speculation(decoder.head, decoder.settings).controller
        assert controller is not None
        assert (seen is not None) == looks and (seen is None or 0.5 < seen < 0.9)
        assert controller.acceptance.first == (FIRST_GUESS if seen is None else seen)


def test_the_reason_is_that_of_the_next_round() -> None:
    """Keeps out: a "next best" shape that is faster than the one that runs, and a list of what is to be measured without an
    entry, after everything was."""
    for rounds in (9, 10, 11, 60, 100, 200):
        speculation = Speculation(SHAPES, is_auto=True)
        Busy(speculation, 1, cost=on_cpu, busy=0.5).run(2, rounds, Text.of(2.5))
        (reason,) = speculation.reasons()
        assert not reason.endswith(": "), reason
        if "next best" in reason:
            speeds = [float(tokens) / float(ms) for tokens, ms in re.findall(r"with ([\d.]+) tokens in ([\d.]+) ms", reason)]
            assert speeds[1] < 1.1 * speeds[0], reason
