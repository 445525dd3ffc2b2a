"""SpecConfig("auto") in simulated time: close to the best fixed shape, and to plain decoding where drafts are never right."""

import copy
import pickle
import random

import pytest
from toolkit.inside.simulated import A_TOKEN, SimulatedDevice, Text, best_on_h200, best_rate, cost, on_h200, plain_cost

from specdec import SpecConfig
from specdec.engine.control.acceptance import Acceptance
from specdec.engine.control.controller import LOOKING, Controller, RoundSize
from specdec.engine.control.costs import Costs
from specdec.engine.speculation import Speculation
from specdec.generation import Emitted
from specdec.limits import MAX_PAUSE
from specdec.steps import Needs, RunRound, Try

SHAPES = SpecConfig("auto", 4, 16).shapes


def machine(ready: tuple[int, ...] = (), captures: bool = True, seed: int = 0) -> SimulatedDevice:
    """ready: numbers of rows for which everything is captured ahead."""
    speculation = Speculation(SHAPES, 0.15 if captures else 0.0, is_auto=True)
    made = SimulatedDevice(speculation, seed)
    if ready:
        made.run(ready[0], 3, Text(0.5))
        made.prepare(speculation.make_ready(ready)) if not speculation.pause else None
    return made


@pytest.mark.slow_cases(keep=8)
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
@pytest.mark.parametrize("tau", [1.5, 2, 3, 4.5, 6])
@pytest.mark.parametrize("branches", [0.0, 0.5])
def test_within_five_percent_of_the_best_fixed_shape(tau: float, rows: int, branches: float) -> None:
    """Keeps out: a rule that stays with its first choice, takes luck for a trend, or looks around at too great a cost."""
    text, made = Text.of(tau, branches), machine((rows,))
    made.run(rows, 200, text)
    assert made.run(rows, 300, text) > 0.95 * best_rate(rows, text, SHAPES)


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 64])
def test_within_two_percent_of_plain_if_drafts_are_never_right(rows: int) -> None:
    """Keeps out: looks so frequent, or so early, that speculation which is off still costs.  Catching up is counted too."""
    made = machine((rows,))
    made.run(rows, 200, Text(0.0))
    rate = made.run(rows, 800, Text(0.0))
    assert rate > 0.98 * rows / (1.01 * plain_cost(rows))
    assert set(made.shapes[-800:]) != {None}, "the drafter is looked at now and then"


@pytest.mark.slow_cases
@pytest.mark.parametrize("rows", [1, 16])
def test_a_text_that_changes_is_followed(rows: int) -> None:
    """Keeps out: a pause that never ends, and speculation that goes on when drafts have become worthless."""
    made, good, bad = machine((rows,)), Text.of(4.5), Text(0.02)
    for text in (bad, good, bad):
        made.run(rows, 1500, text)
        assert made.run(rows, 200, text) > 0.95 * best_rate(rows, text, SHAPES)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_change_is_noticed_within_a_hundred_rounds(rows: int) -> None:
    """Keeps out: what was seen of an earlier text, above all at levels that are hardly reached now, deciding for long."""
    made = machine((rows,))
    for tau in (3, 1, 6, 1.5, 4.5, 1, 6):
        text = Text.of(tau) if tau > 1 else Text(0.0)
        made.run(rows, 100, text)
        assert made.run(rows, 240, text) > 0.95 * best_rate(rows, text, SHAPES)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("taus", [(6, 4.5, 3, 2, 1.5), (1.5, 3, 2, 6, 4.5)])
def test_close_to_the_best_with_costs_as_measured(rows: int, taus: tuple[float, ...]) -> None:
    """Costs of an H200, which no line goes through, and texts that grow, end and begin anew.  Keeps out: a shape that is ruled
    out by a cost from a longer text, or by what others showed in their first rounds; a better depth that is never tried."""
    speculation = Speculation(SHAPES, 0.15, is_auto=True)
    made = SimulatedDevice(speculation, cost=on_h200, a_token=A_TOKEN, uneven=0.04)
    made.run(rows, 3, Text(0.5))
    made.prepare(speculation.make_ready([rows]) if not speculation.pause else [])
    shares = []
    for tau in taus:
        text = Text.of(tau)
        made.run(rows, 150, text)
        shares.append(1.02 * made.run(rows, 500, text) / best_on_h200(rows, text))
    assert min(shares) > 0.95 and sum(shares) > 0.97 * len(shares), shares


@pytest.mark.parametrize("tau", [1.5, 3, 6])
def test_drafts_that_are_never_right_any_more_are_given_up_soon(tau: float) -> None:
    """One row, so that a round tells little.  Keeps out: old acceptance that outweighs a run of refusals for long."""
    made = machine((1,))
    made.run(1, 300, Text.of(tau))
    made.run(1, 80, Text(0.0))
    assert made.shapes[-10:].count(None) >= 9, "one may be a look"


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_drafts_that_become_right_are_found_by_a_look(rows: int) -> None:
    """Keeps out: thousands of rounds whose drafts were worth nothing, which outweigh what a look shows of another text."""
    made = machine((rows,))
    made.run(rows, 1500, Text(0.0))
    made.run(rows, 150, Text.of(4.5))
    assert None not in made.shapes[-20:]


def test_a_shape_that_is_new_does_not_change_what_others_cost() -> None:
    """Keeps out: the luck of a shape's first rounds, which raised the costs of all others for good."""
    rng, costs, shapes = random.Random(0), Costs(first_counts=True), SHAPES[:6]
    for shape in shapes:
        for _ in range(40):
            costs.observe(shape, cost(8, shape) * (1 + 0.1 * rng.random()))
    for shape in shapes:
        assert costs.of(shape) == pytest.approx(1.05 * cost(8, shape), rel=0.03)


def test_a_round_that_compiles_tells_no_cost() -> None:
    """Keeps out: seconds of a compiler that are taken for those of a shape, and a trial that is thrown away like them."""
    costs, tried, shape = Costs(first_counts=False), Costs(first_counts=False), SpecConfig(3, 1)
    costs.observe(shape, 30.0)
    assert not costs.is_known(shape) and costs.runs(shape) == 1
    costs.observe(shape, 2.0)
    tried.tried(shape, 1.5)
    assert (costs.of(shape), tried.of(shape)) == (2.0, 1.5)


def test_a_chain_that_never_ran_is_told_by_its_neighbours() -> None:
    """Keeps out: a line through shapes that are far away, and a tree whose nodes cost nothing."""
    costs = Costs(first_counts=True)
    for shape, seconds in ((None, 4.0), (SpecConfig(2, 1), 5.0), (SpecConfig(10, 1), 29.0), (SpecConfig(2, 4, 13), 6.0)):
        costs.tried(shape, seconds)
    assert [costs.of(SpecConfig(levels, 1)) for levels in (1, 3, 4, 9)] == pytest.approx([4.5, 5.5, 6.0, 26.0])
    assert costs.of(SpecConfig(2, 4, 8)) == pytest.approx(5.5) and costs.of(SpecConfig(3, 4, 14)) == pytest.approx(6.5)


def test_costs_follow_the_length_of_texts() -> None:
    """Keeps out: shapes that were measured over short texts, compared with one that runs over long ones."""
    rng, costs, (short, long) = random.Random(1), Costs(first_counts=True), SHAPES[:2]
    for length in (*range(100), *range(900), *range(300)):
        shape, tokens = (short if length < 20 else long), 32 * length
        costs.observe(shape, (cost(32, shape) + A_TOKEN * tokens) * (1 + 0.02 * rng.random()), tokens)
    for shape in (short, long):
        assert costs.of(shape) == pytest.approx(1.01 * (cost(32, shape) + A_TOKEN * 32 * 300), rel=0.01)
    assert costs.growth == pytest.approx(A_TOKEN, rel=0.2)


def test_a_machine_that_slows_down_is_not_taken_for_long_texts() -> None:
    """Keeps out: costs of almost nothing for short texts, after a machine has slowed down while a text grew."""
    costs, (cheap, dear) = Costs(first_counts=True), (SHAPES[0], SHAPES[6])
    for length in range(600):
        slower = 3 if length > 300 else 1
        costs.observe(cheap if length < 20 else dear, slower * cost(1, cheap if length < 20 else dear), length)
    costs.observe(dear, cost(1, dear), 10)
    for shape in (cheap, dear):
        assert 0.4 * cost(1, shape) < costs.of(shape) < 3 * cost(1, shape)
    for length in range(60):
        costs.observe(dear, cost(1, dear), length)
    assert costs.of(dear) == pytest.approx(cost(1, dear), rel=0.04)
    assert 0.5 * cost(1, cheap) < costs.of(cheap) < 1.6 * cost(1, cheap)


def test_a_look_tells_of_the_shape_that_was_looked_at() -> None:
    """Keeps out: a cost that has changed for one shape alone, shared out among all."""
    costs, (steady, other) = Costs(first_counts=True), SHAPES[:2]
    for number in range(400):
        shape = other if number % 20 == 0 else steady
        costs.observe(shape, 0.004 if shape == steady else 0.006 if number < 100 else 0.005)
    assert costs.of(steady) == pytest.approx(0.004, rel=0.02) and costs.of(other) == pytest.approx(0.005, rel=0.03)


@pytest.mark.parametrize("rows", [1, 8])
def test_trees_are_tried_again(rows: int) -> None:
    """Keeps out: branches that were worth nothing once, and are never asked for again while a chain runs."""
    made = machine((rows,))
    made.run(rows, 600, Text(0.6))
    text = Text(0.6, 1.0)
    made.run(rows, 1200, text)
    assert made.run(rows, 300, text) > 0.95 * best_rate(rows, text, SHAPES)
    assert best_rate(rows, text, SHAPES) > 1.1 * best_rate(rows, text, [shape for shape in SHAPES if shape.topk == 1])


def test_deep_levels_are_forgotten_with_the_text() -> None:
    """Keeps out: what a good text accepted at levels that a bad one hardly reaches, which makes the deepest chain look best."""
    rng, deep, acceptance = random.Random(0), SpecConfig(10, 1), Acceptance(10)
    for text, rounds in ((Text.of(6), 200), (Text.of(1.5), 60)):
        for _ in range(rounds):
            a, best = text.accept(deep, rng)
            acceptance.observe(deep, [a], [best])
    assert acceptance.accept_lengths([deep])[0] < 1.8


def test_batch_sizes_are_judged_apart() -> None:
    """Keeps out: the costs of a small batch taken for those of a large one, as rows come and go."""
    made, text, rng = machine((1, 8, 64)), Text.of(3), random.Random(0)
    sizes = [rng.choice([1, 8, 64]) for _ in range(60)]
    spent = best = 0.0
    for number, rows in enumerate(sizes):
        before = made.seconds, made.tokens
        made.run(rows, 10, text)
        if number > 20:
            spent += made.seconds - before[0]
            best += (made.tokens - before[1]) / best_rate(rows, text, SHAPES)
    assert best > 0.95 * spent


@pytest.mark.parametrize("captures", [False, True])
def test_without_captures_ahead_it_comes_close_too(captures: bool) -> None:
    """Keeps out: captures that are never made, or made for shapes that hardly gain; captures count as lost time here."""
    made, text = machine(captures=captures), Text.of(4.5)
    made.run(8, 1200, text)
    assert made.run(8, 400, text) > 0.95 * best_rate(8, text, SHAPES)
    captured = sum(book.costs.is_known(shape) for book in made.speculation.controller.books.values() for shape in SHAPES)
    assert not captures or captured < len(SHAPES)


def test_few_rows_that_speculate_do_not_slow_many_that_do_not() -> None:
    """Keeps out: shapes chosen as though every row gained from them, while most rows only wait for the draft."""
    made = machine((16,))
    made.run(16, 300, Text.of(4.5))
    controller = made.speculation.controller
    assert controller is not None
    alike = [controller.choose(RoundSize(16), 1.0, 0) for _ in range(20)]
    few = [controller.choose(RoundSize(16), 1 / 16, 0) for _ in range(20)]
    assert None not in alike and few.count(None) >= 19


def test_rounds_with_a_grammar_have_costs_of_their_own() -> None:
    """Keeps out: rounds that run phase by phase, by whose costs the fused ones are judged."""
    controller, shape = Controller((SpecConfig(2, 1),)), SpecConfig(2, 1)
    for _ in range(8):
        controller.observe(RoundSize(4), shape, 0.01, [1])
    before = controller.books[RoundSize(4)].costs.of(shape)
    for _ in range(8):
        controller.observe(RoundSize(4, grammar=True), shape, 0.05, [1])
    assert controller.books[RoundSize(4)].costs.of(shape) == before
    assert controller.books[RoundSize(4, grammar=True)].costs.of(shape) > 2 * before


def test_a_measured_round_goes_into_the_book_of_its_kind() -> None:
    """Keeps out: rounds with a grammar whose seconds are taken for those without, by whoever hands them on."""
    speculation = Speculation(SHAPES, is_auto=True)
    assert speculation.controller is not None
    for has_grammar in (False, True):
        step = RunRound(4, "speculative", SHAPES[0], Needs.of(*["grammar"] * has_grammar), timed=True)
        speculation.observe(step, 1e-3, [Emitted([0])] * 4)
        assert set(speculation.controller.books) == {RoundSize(4), RoundSize(4, grammar=True)} - (
            {RoundSize(4, True)} - {RoundSize(4, has_grammar)}
        )


def test_what_was_long_ago_counts_little() -> None:
    """Keeps out: thousands of rounds that outweigh what a text accepts now, where it changes too little to be noticed."""
    acceptance, shape = Acceptance(1), SpecConfig(1, 1)
    for shares, times in (((18, 18, 18), 100), ((18, 18, 17), 20)):  # of 20 rows
        for share in shares * times:
            acceptance.observe(shape, [1] * share + [0] * (20 - share))
    assert acceptance.rates(1)[0] == pytest.approx(53 / 60, abs=0.006)


def test_a_disturbed_measurement_is_outlived() -> None:
    """Keeps out: one round that a busy machine held up, which rules a shape out for good."""
    made, text = machine((4,)), Text.of(4.5)
    calm, calls = made.cost, iter(range(10**6))
    made.cost = lambda rows, shape: calm(rows, shape) * (30 if next(calls) % 40 == 7 else 1)
    made.run(4, 300, text)
    made.cost = calm
    made.run(4, 200, text)
    assert made.run(4, 200, text) > 0.95 * best_rate(4, text, SHAPES)


def test_looks_lose_no_more_than_their_share() -> None:
    """Keeps out: an account that can be overdrawn, or that looks do not empty, and a share that never falls to the least one.
    Every round but the best one is a look, with drafts worth nothing."""
    made = machine((32,))
    made.run(32, 300, Text(0.0))
    shapes, start = len(made.shapes), made.seconds
    made.run(32, 2000, Text(0.0))
    lost = sum(cost(32, shape) - cost(32, None) for shape in made.shapes[shapes:] if shape is not None)
    assert 0 < lost < LOOKING[1] * (made.seconds - start)


def test_looks_wait_for_the_drafter_to_catch_up_and_for_captures() -> None:
    """Keeps out: a look that makes the drafter catch up early, or that captures a graph in the middle of a text."""
    speculation = Speculation(SHAPES, 1e9, is_auto=True)
    made = SimulatedDevice(speculation)
    made.run(8, 40, Text(0.0))
    tried, pauses = list[Try](), list[int]()
    for _ in range(1500):
        pause = speculation.pause
        before, step = speculation.next_round(8, Needs(), False, 1.0)
        tried += [each for each in before if isinstance(each, Try)]
        if step.spec is not None:
            pauses.append(pause)
        speculation.observe(step, cost(8, step.spec), [Emitted([0], (0, 1))] * 8)
    assert not tried and pauses and set(pauses[2:]) <= {MAX_PAUSE}


@pytest.mark.parametrize("seed", range(4))
def test_decisions_follow_from_verified_rounds_alone(seed: int) -> None:
    """The same verified rounds lead to the same decisions on a copy, whatever tokens are in flight, and whichever process
    decides.  Keeps out: a clock, an order of sets or an unverified token in a decision."""
    rng = random.Random(seed)
    made = machine(captures=seed % 2 == 0, seed=seed)
    made.run(4, 120, Text.of(rng.choice([1.2, 3, 5])))
    twin = pickle.loads(pickle.dumps(made.speculation))
    told, other = copy.deepcopy(made.speculation), Text.of(2)
    for _ in range(60):
        plans = [each.next_round(4, Needs(), False, 1.0) for each in (twin, told)]
        assert plans[0] == plans[1]
        step, seconds = plans[0][1], rng.random() * 1e-2
        rows = [other.accept(step.spec, rng) for _ in range(4)]
        for each in (twin, told):
            each.observe(step, seconds, [Emitted([0] * (a + 1), best) for a, best in rows])


def test_what_a_tree_accepts_tells_of_chains() -> None:
    """Keeps out: a chain that has to be looked at, to see that a tree's branches are worth nothing or much."""
    rng, tree = random.Random(0), SpecConfig(5, 4, 16)
    for branches in (0.0, 0.6):
        acceptance, text = Acceptance(10), Text(0.7, branches)
        for _ in range(200):
            rows = [text.accept(tree, rng) for _ in range(8)]
            acceptance.observe(tree, [a for a, _ in rows], [best for _, best in rows])
        chain, wide = acceptance.accept_lengths([SpecConfig(5, 1), tree])
        assert chain == pytest.approx(text.accept_length(SpecConfig(5, 1)), rel=0.08)
        assert wide == pytest.approx(text.accept_length(tree), rel=0.08)


def test_a_tree_is_worth_what_it_emits() -> None:
    """A drafter that is sure in one half of the rounds and not in the other, where the path of its first choices ends early for
    want of nodes.  Keeps out: the levels of sure rounds taken for those of all, which makes the deepest tree look best."""
    rng, tree, acceptance, emitted = random.Random(0), SpecConfig(7, 4, 16), Acceptance(10), 0
    for number in range(1000):
        is_sure = rng.random() < 0.5
        length, level = (7, 0.95) if is_sure else (2, 0.5)
        a = next((depth for depth in range(length) if rng.random() > level), length)
        acceptance.observe(tree, [a], [(a, length)])
        emitted += a + 1 if number >= 500 else 0
    assert acceptance.accept_lengths([tree])[0] == pytest.approx(emitted / 500, rel=0.06)


def test_a_level_that_was_not_asked_for_is_not_counted_as_refused() -> None:
    """Keeps out: a path of first choices that ends early for want of nodes, taken for a refusal."""
    acceptance = Acceptance(4)
    for _ in range(50):
        acceptance.observe(SpecConfig(3, 2, 8), [1], [(1, 1)])
    assert acceptance.rates(2)[0] > 0.9 and acceptance.reached[1] == 0


def test_the_reason_names_what_runs() -> None:
    """Keeps out: a reason that says something else than what runs."""
    made = machine((8,))
    assert made.speculation.reasons()[0].startswith("8 rows: ")
    made.run(8, 300, Text.of(4.5))
    (reason,) = made.speculation.reasons()
    shape = made.speculation.controller.books[RoundSize(8)].best
    assert shape is not None and made.shapes[-1] == shape
    assert reason.startswith(f"8 rows: chain {shape.label} with ")
    assert "; next best " in reason and reason.count(f" {shape.label} ") == 1, "the next best is another one"
    assert Speculation((SpecConfig(5, 1),)).reasons() == []


def test_the_reason_says_what_is_known_before_anything_is_chosen() -> None:
    """Keeps out: "nothing was measured" after a text whose rounds were all counted."""
    shapes, size = (SpecConfig(2, 1), SpecConfig(5, 1), SpecConfig(5, 4, 16)), RoundSize(1)
    controller = Controller(shapes)
    assert controller.reason(size) == "1 row: none yet; no round ran"
    controller.observe(size, controller.choose(size, 1.0, 0), 0.5, [])
    untimed = "the first round of a shape is not timed, as it may compile"
    assert controller.reason(size) == f"1 row: none yet; {untimed}; to be measured: no levels, chain 2,1,3"
    controller.observe(size, controller.choose(size, 1.0, 0), 0.004, [])
    found = controller.reason(size)
    assert found.startswith("1 row: none yet; measured so far: no levels with ") and "tokens in 4.00 ms" in found
    assert found.endswith("; to be measured: chain 2,1,3")
    assert isinstance(Speculation((SpecConfig(5, 1),)).next_round(8, Needs(), False, 1.0)[1], RunRound)
