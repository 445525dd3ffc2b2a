"""Of cases that take turns every one is run, whatever their number."""

import pytest
from toolkit.suite.turns import SECONDS_A_DAY, TURNS, at_its_turn, turn_of_day


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_every_case_has_its_turn(count: int) -> None:
    """Keeps out: a case that no run of the whole suite has, and a day that has most of a test's cases."""
    cases = list(range(count))
    days = [at_its_turn("tests/test_x.py::test_y", cases, turn_of_day(day * SECONDS_A_DAY)) for day in range(TURNS)]
    assert sorted(sum(days, [])) == cases and all(day == sorted(day) for day in days)
    assert max(map(len, days)) - min(map(len, days)) <= 1


def test_tests_of_one_case_are_spread() -> None:
    """Keeps out: a day on which each test with a single case has it, and days without any."""
    counts = [sum(len(at_its_turn(f"test_{number}", ["it"], turn)) for number in range(600)) for turn in range(TURNS)]
    assert sum(counts) == 600 and min(counts) > 28


@pytest.mark.parametrize("least", [1, 2, 5])
def test_a_day_has_as_many_cases_as_are_asked_for(least: int) -> None:
    """Keeps out: a test that some runs of the whole suite lack, or have with fewer cases than others; a case without a day."""
    for count in range(1, 50):
        days = [at_its_turn("tests/test_x.py::test_y", range(count), turn, least) for turn in range(TURNS)]
        assert set().union(*days) == set(range(count))
        assert {len(day) for day in days} <= {max(min(least, count), count // TURNS + more) for more in range(2)}
