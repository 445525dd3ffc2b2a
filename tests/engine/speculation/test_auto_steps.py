"""num_steps="auto": the chooser finds the fastest number of levels, and its probes cost little.

These tests simulate rounds of known cost and acceptance; no model runs.
"""

import random

import pytest

from specdec.engine.auto_steps import StepChooser

MAX = 7


def run(
    chooser: StepChooser, rows: int, rounds: int, acceptance: float, plain: float, step: float, seed: int = 0
) -> tuple[list[int], float, float]:
    """(levels chosen, tokens, seconds) of simulated rounds, which cost `plain` seconds and `step` more for each level."""
    rng = random.Random(seed)
    chosen, tokens, seconds = [], 0, 0.0
    for _ in range(rounds):
        steps = chooser.choose(rows, 1.0)
        cost = plain + step * steps
        accepted = []
        for _ in range(rows):
            taken = 0
            while taken < steps and rng.random() < acceptance:
                taken += 1
            accepted.append(taken)
        chooser.observe_acceptance(steps, accepted)
        chooser.observe_cost(rows, steps, cost * (1 + 0.02 * rng.random()))
        chosen.append(steps)
        tokens, seconds = tokens + sum(accepted) + rows, seconds + cost
    return chosen, tokens, seconds


def best_rate(rows: int, acceptance: float, plain: float, step: float) -> float:
    return max(rows * sum(acceptance**d for d in range(s + 1)) / (plain + step * s) for s in range(MAX + 1))


@pytest.mark.slow_cases
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("acceptance", "step"), [(0.85, 0.05), (0.6, 0.05), (0.5, 0.3), (0.3, 0.5), (0.05, 0.2), (0.95, 0.01)])
def test_it_comes_close_to_the_best(rows: int, acceptance: float, step: float) -> None:
    """Keeps out: a rule that stays with its first choice, or one that never finds out that drafting pays."""
    _, tokens, seconds = run(StepChooser(MAX), rows, 3000, acceptance, 1.0, step)
    assert tokens / seconds > 0.96 * best_rate(rows, acceptance, 1.0, step)


def test_without_hope_it_costs_two_percent_at_most() -> None:
    """Keeps out: a probe so frequent that speculation which is off still costs.  Nothing is ever accepted."""
    chooser = StepChooser(MAX)
    run(chooser, 32, 100, 0.0, 1.0, 0.07)
    chosen, tokens, seconds = run(chooser, 32, 2000, 0.0, 1.0, 0.07)
    assert seconds / (tokens / 32) < 1.01 and chosen.count(0) > 1900 and MAX in chosen


def test_it_sees_a_change_of_text() -> None:
    """Keeps out: a pause that never ends.  A text that can't be drafted is followed by one that can."""
    chooser = StepChooser(MAX)
    chosen, _, _ = run(chooser, 4, 1500, 0.02, 1.0, 0.1)
    assert chosen[-1] == 0
    chosen, tokens, seconds = run(chooser, 4, 6000, 0.9, 1.0, 0.1)
    assert sum(steps >= 4 for steps in chosen[-100:]) >= 97  # plain decoding is probed now and then
    chosen, _, _ = run(chooser, 4, 1500, 0.02, 1.0, 0.1)
    assert chosen[-20:].count(0) >= 18


def test_batch_sizes_are_judged_apart() -> None:
    """Keeps out: the costs of a small batch taken for those of a large one."""
    chooser = StepChooser(MAX)
    small, _, _ = run(chooser, 1, 200, 0.6, 1.0, 0.02)
    large, _, _ = run(chooser, 64, 200, 0.6, 1.0, 2.0)
    assert small[-1] >= 3 and large[-50:].count(0) >= 48
    assert chooser.choose(1, 1.0) >= 3


def test_few_rows_that_speculate_do_not_slow_many_that_do_not() -> None:
    """Keeps out: levels chosen as though every row gained from them, while most rows only wait for the draft."""
    chooser = StepChooser(MAX)
    run(chooser, 16, 400, 0.8, 1.0, 0.1)
    assert chooser.accept_length(4) > 2.5
    alike = [chooser.choose(16, 1.0) for _ in range(50)]
    few = [chooser.choose(16, 1 / 16) for _ in range(50)]
    assert sum(steps >= 3 for steps in alike) >= 48 and few.count(0) >= 48
    assert 1 < chooser.accept_length(4) < 1.2


def test_a_disturbed_measurement_is_outlived() -> None:
    """Keeps out: one round that a busy machine held up, which rules speculation out for good."""
    chooser = StepChooser(MAX)
    for steps, seconds in ((MAX, 9.0), (MAX, 50.0), (MAX, 1.4), (MAX, 1.4), (0, 9.0), (0, 1.0), (0, 1.0), (0, 1.0)):
        assert chooser.choose(1, 1.0) == steps
        chooser.observe_cost(1, steps, seconds)
        chooser.observe_acceptance(steps, [5] if steps else [0])
    assert chooser.choose(1, 1.0) >= 4


def test_plain_steps_measured_at_a_bad_time_are_measured_again() -> None:
    """Keeps out: drafting at a loss for good, because plain decoding was slow once, when it was probed."""
    chooser = StepChooser(MAX)
    for _ in range(8):
        steps = chooser.choose(1, 1.0)
        chooser.observe_acceptance(steps, [min(steps, 1)])
        chooser.observe_cost(1, steps, 7.0 + steps if steps else 20.0)  # four times what a plain step takes
    run(chooser, 1, 2500, 0.3, 5.0, 1.4)
    chosen, tokens, seconds = run(chooser, 1, 2000, 0.3, 5.0, 1.4)
    assert tokens / seconds > 0.96 * best_rate(1, 0.3, 5.0, 1.4)


def test_a_new_shape_must_pay_for_itself() -> None:
    """Keeps out: a short run that spends its time capturing graphs of shapes a little better than those it has."""
    few, _, _ = run(StepChooser(MAX, new_shape_seconds=200.0), 8, 300, 0.7, 1.0, 0.15)
    assert set(few) == {0, MAX}  # the shapes of the first probes
    many, tokens, seconds = run(StepChooser(MAX, new_shape_seconds=200.0), 8, 6000, 0.7, 1.0, 0.15)
    assert set(many[-100:]) - {0, MAX} and tokens / seconds > 0.93 * best_rate(8, 0.7, 1.0, 0.15)
