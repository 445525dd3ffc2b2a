"""Cases of a test that take turns: one run of the whole suite has a part of them, and the runs of TURNS days have all.

It knows cases by their places in a list, not what they test.
"""

import random
import time
from collections.abc import Sequence
from typing import TypeVar

TURNS = 7  # a week has all cases
SECONDS_A_DAY = 86400
Case = TypeVar("Case")


def turn_of_day(seconds: float | None = None) -> int:
    """The turn of the day, in universal time, of so many seconds since 1970; None: of today."""
    return int((time.time() if seconds is None else seconds) // SECONDS_A_DAY) % TURNS


def all_take_turns(kept: int, later: int) -> bool:
    """Whether those of a test that every run would have take turns like its later ones: each day has as many without them."""
    return kept > 0 and later >= kept * TURNS


def at_its_turn(test: str, cases: Sequence[Case], turn: int) -> list[Case]:
    """Of the cases of a test those of that turn, in their order.

    Which cases share a turn is drawn by the test's name, once for ever: neighbours among the cases are alike, and tests of few
    cases shall not all have them on the same day.
    """
    chance = random.Random(test)
    places = list(range(len(cases)))
    chance.shuffle(places)
    first = chance.randrange(TURNS)
    return [case for case, place in zip(cases, places, strict=True) if (first + place) % TURNS == turn]
