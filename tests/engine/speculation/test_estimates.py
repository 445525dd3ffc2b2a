"""What the controller goes by, from few numbers whose answer is known: what rounds accept, what they cost, what is missed."""

import math
import random

import pytest

from specdec import SpecConfig
from specdec.engine.control.acceptance import MAX_BRANCHING, Acceptance, Branching
from specdec.engine.control.controller import JUDGE_EVERY, MIN_WAIT, Controller, RoundSize
from specdec.engine.control.costs import Costs
from specdec.engine.control.path_rates import MEMORY_ROUNDS
from specdec.engine.launches.launch import Planned
from specdec.generation import Emitted
from specdec.limits import MAX_PAUSE
from specdec.steps import Needs, RunRound

CHAIN, LONG, TREE, WIDE = SpecConfig(2, 1, 3), SpecConfig(5, 1, 6), SpecConfig(2, 2, 6), SpecConfig(2, 4, 11)


def test_large_batches_are_remembered_for_some_rounds() -> None:
    """Keeps out: one round of hundreds of rows in place of all that was known, so that its chance decides."""
    rows, acceptance = 600, Acceptance(1)
    for _ in range(60):
        acceptance.observe(SpecConfig(1, 1, 2), [1] * rows)
    assert acceptance.reached[0] == pytest.approx(rows / (1 - math.exp(-1 / MEMORY_ROUNDS)), 0.01)


@pytest.mark.parametrize("found", [0, 1])
def test_what_branches_are_worth_has_bounds(found: int) -> None:
    """Keeps out: trees worth less than the chain in them, or all that there is, after rounds of luck."""
    branching = Branching()
    for _ in range(200):
        branching.learn(1.0, [0.5] * 3, [9] * 3, [9 * found] * 3)
    assert branching.value == (MAX_BRANCHING if found else 0.0)


def test_another_batch_size_tells_how_costs_grow() -> None:
    """Keeps out: a cost that was measured for fewer rows taken as it is for more."""
    small, large = Costs(first_counts=True), Costs(first_counts=True)
    large.like = small
    for shape, seconds in ((None, 2.0), (CHAIN, 3.0), (LONG, 4.0)):
        small.tried(shape, seconds)
    large.tried(None, 6.0)
    large.tried(CHAIN, 9.0)
    assert large.of(LONG) == pytest.approx(12.0)


def test_a_slow_host_is_slow_for_what_was_only_tried_too() -> None:
    """Keeps out: the most that a host took for any shape, added to the costs of all that did not run yet."""
    costs = Costs(first_counts=True)
    for shape, seconds in ((None, 1.0), (CHAIN, 2.0), (LONG, 3.0)):
        costs.tried(shape, seconds)
    for _ in range(4):
        costs.observe(None, 1.7)
        costs.observe(CHAIN, 2.2)
    assert costs.of(LONG) == pytest.approx(3.2)


def test_a_node_costs_what_it_costs_where_it_is_cheapest() -> None:
    """Keeps out: a tree that nobody tries because another one was slow."""
    for trees in ((TREE, WIDE), (WIDE, TREE)):
        costs = Costs(first_counts=True)
        costs.tried(CHAIN, 10.0)
        for tree, each in zip(trees, random.Random(0).sample([0.1, 0.5], 2), strict=True):
            costs.tried(tree, 10.0 + each * (tree.num_draft_tokens - 3))
        assert costs.of(SpecConfig(2, 3, 8)) == pytest.approx(10.0 + 0.1 * 5)


def test_a_shape_is_made_ready_once_it_has_been_missed_for_as_long_as_that_takes() -> None:
    """Keeps out: the loss of every fourth round alone, counted where shapes are judged so often."""
    size, ready, best = RoundSize(1), (None, CHAIN, LONG), SpecConfig(3, 1, 4)
    controller = Controller((CHAIN, best, LONG), ready_seconds=10.0)
    controller.acceptance.observe(LONG, [3] * 900)
    for shape, seconds in ((None, 1.0), (CHAIN, 1.2), (LONG, 1.8)):
        controller.tried(size, shape, seconds)
    rounds = 0
    while not (wanted := controller.wanted(size, 1.0, ready)):
        controller.choose(size, 1.0, 0, ready)
        rounds += 1
    rates = controller.rates(size, 1.0, controller.all)
    lost = 1.4 * (rates[best] / rates[CHAIN] - 1)
    assert wanted == [best] and max(rates, key=lambda shape: rates[shape]) == best
    assert 7.0 / lost <= rounds <= 10.0 / lost + JUDGE_EVERY, "what is not sure speaks for a shape, so it is missed more"


def test_a_grammar_s_rounds_are_told_by_other_rounds_with_a_grammar() -> None:
    """Keeps out: costs of rounds that run as one graph for rounds that run phase by phase, because they have as many rows."""
    controller = Controller((CHAIN, LONG))
    for size, seconds in ((RoundSize(4), 1.0), (RoundSize(1, grammar=True), 5.0)):
        for _ in range(4):
            controller.observe(size, LONG, seconds, [1])
    assert controller._book(RoundSize(4, grammar=True)).costs.like is controller.books[RoundSize(1, grammar=True)].costs
    assert controller._book(RoundSize(8)).costs.like is controller.books[RoundSize(4)].costs


def test_looks_are_some_rounds_apart() -> None:
    """Keeps out: a drafter that costs next to nothing looked at in every round in which it must catch up."""
    size, controller, looks = RoundSize(1), Controller((CHAIN,)), list[int]()
    for number in range(300):
        shape = controller.choose(size, 1.0, MAX_PAUSE)
        controller.observe(size, shape, 1.0 if shape is None else 1.001, [] if shape is None else [0])
        looks += [number] if shape is not None else []
    apart = [after - before for before, after in zip(looks[10:], looks[11:], strict=False)]
    assert len(apart) > 2 and min(apart) >= MIN_WAIT


def test_no_look_costs_more_than_a_few_rounds() -> None:
    """Keeps out: time saved up through a long text, and spent on one look that holds every row up."""
    size, controller, looks = RoundSize(1), Controller((CHAIN,)), 0
    for number in range(3000):
        shape = controller.choose(size, 1.0, MAX_PAUSE)
        controller.observe(size, shape, 1.0 if shape is None else 10.0, [] if shape is None else [0])
        looks += shape is not None and number > 50
    assert not looks


def test_a_path_that_a_halt_cut_refuses_nothing() -> None:
    """Keeps out: drafts that look worse the more often texts meet a mark, at which a round without masks ends their paths."""
    cut, whole, none = Emitted([1, 2], halted=True), Emitted([1, 2, 3]), Emitted([])
    for needs, told in ((Needs.of("waits"), [whole]), (Needs.of("waits", "grammar"), [cut, whole]), (Needs(), [cut, whole])):
        planned = Planned(RunRound(4, "speculative", CHAIN, needs), [None] * 4, (True, True, True, False))
        assert planned.told([cut, whole, none, whole]) == told
