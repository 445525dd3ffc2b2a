"""Cases of a test that take turns: one run of the whole suite has a part of them, and the runs of TURNS days have all.

It knows cases by their places in a list, not what they test.
"""

import random
import time
from collections.abc import Sequence
from typing import TypeVar

TURNS = 14  # two weeks have all cases
SECONDS_A_DAY = 86400
Case = TypeVar("Case")


def turn_of_day(seconds: float | None = None) -> int:
    """The turn of the day, in universal time, of so many seconds since 1970; None: of today."""
    return int((time.time() if seconds is None else seconds) // SECONDS_A_DAY) % TURNS


def at_its_turn(test: str, cases: Sequence[Case], turn: int, least: int = 0) -> list[Case]:
    """Of the cases of a test those of that turn, in their order.  least: a day has so many, or all if there are fewer.

    Which cases share a turn is drawn by the test's name, once for ever: neighbours among the cases are alike, and tests of few
    cases shall not all have them on the same day.
    """
    chance, number = random.Random(test), len(cases)
    places = list(range(number))
    chance.shuffle(places)
    day = (turn - chance.randrange(TURNS)) % TURNS
    if number >= least * TURNS:
        today = set(range(day, number, TURNS))
    else:  # days that follow each other go on in the same row, again and again
        today = {(day * least + each) % number for each in range(least)}
    return [case for case, place in zip(cases, places, strict=True) if place in today]
