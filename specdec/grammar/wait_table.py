"""How a text waits for its grammar, as a table over tokens, with which the device follows the text by itself.

The table is a plan (wait.py) with a number for each of its states and a class for each token, so that no state is approximate:
it halts where the plan needs a mask, and goes on wherever the plan does.  This module knows no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.grammar.wait import ARMED, BLANKS, NEVER, WaitPlan, WaitState

MAX_STATES = 256  # of a table: one of many markers takes too long to make, and its texts take rounds with masks from the start
MAX_ENTRIES = 1 << 14  # of `WaitTable.after`


class WaitTable(NamedTuple):
    """tokens, classes: the tokens of a class other than 0, and their classes.  num_classes: class 0 is among them.
    after: the state after a token, at state * num_classes + class.
    first_halt: from this state on, a text needs the masks that the host makes: its grammar holds, or some token would write the
        mark and go on.
    state: where the text stands.
    bans_ends: whether nothing may end the text in all states before first_halt, because its grammar must still come.
    """

    tokens: Sequence[int]
    classes: Sequence[int]
    num_classes: int
    after: Sequence[int]
    first_halt: int
    state: int
    bans_ends: bool

    @property
    def halts(self) -> bool:
        """Whether the text needs masks where it stands."""
        return self.state >= self.first_halt

    def led(self, written: Sequence[int]) -> WaitTable:
        """The same after more tokens."""
        if not written:
            return self
        state, of_token = self.state, dict(zip(self.tokens, self.classes, strict=True))
        for token in written:
            state = self.after[state * self.num_classes + of_token.get(token, 0)]
        return self._replace(state=state)


def wait_table(plan: WaitPlan) -> WaitTable | None:
    """The plan's table; None: it would be too large, or the text never goes without masks."""
    states = None if plan.first.phase == ARMED else _states(plan)
    if states is None:
        return None
    states.sort(key=plan.needs_mask)
    numbers = {state: number for number, state in enumerate(states)}
    columns = _Columns(plan, states, numbers)
    relevant = [token for token in range(plan.vocab_size) if _is_relevant(plan, token)]
    others = sorted({*range(len(relevant) + 1)}.difference(relevant))  # the first of them is no relevant token
    of_column = {columns.of(others[0]): 0} if others[0] < plan.vocab_size else {}
    found = {token: of_column.setdefault(columns.of(token), len(of_column)) for token in relevant}
    if len(states) * len(of_column) > MAX_ENTRIES:
        return None
    after = tuple(state for row in zip(*of_column, strict=True) for state in row)
    first_halt = sum(not plan.needs_mask(state) for state in states)
    tokens, classes = tuple(found), tuple(found.values())
    return WaitTable(tokens, classes, len(of_column), after, first_halt, numbers[plan.first], not plan.waits)


class _Columns:
    """What tokens do, byte by byte, to all states at once.  Shapes: S states, 256 bytes."""

    def __init__(self, plan: WaitPlan, states: Sequence[WaitState], numbers: dict[WaitState, int]) -> None:
        self._plan, self._armed, self._never = plan, numbers[WaitState(ARMED)], numbers[WaitState(NEVER)]
        self._opens = [number for state, number in numbers.items() if plan.is_first_of_answer(state, -1)]
        alphabet, other = _alphabet(plan)
        self._after_SB = np.empty((len(states), 256), np.int64)
        for number, state in enumerate(states):
            self._after_SB[number] = numbers[_merged(plan.after_byte(state, bytes([other])))]
            for byte in alphabet:
                self._after_SB[number, byte] = numbers[_merged(plan.after_byte(state, bytes([byte])))]

    def of(self, token: int) -> tuple[int, ...]:
        """The states after a token, by the state before it."""
        at_S = np.arange(len(self._after_SB))
        for byte in self._plan.text_of(token):
            at_S = np.where(at_S == self._armed, self._never, self._after_SB[at_S, byte])  # see WaitPlan.crossing
        at_S[self._armed] = self._armed
        if token != self._plan.opening:
            at_S[self._opens] = self._armed
        return tuple(at_S.tolist())


def _alphabet(plan: WaitPlan) -> tuple[list[int], int]:
    """The bytes that mean something while a text waits, and one that means what all others do."""
    known = sorted({*BLANKS, *(byte for mark in plan.marks for byte in mark)})
    return known, next(byte for byte in range(256) if byte not in known)


def _states(plan: WaitPlan) -> list[WaitState] | None:
    """All states that any bytes lead to; None: there are too many."""
    alphabet, other = _alphabet(plan)
    found = dict.fromkeys([plan.first, WaitState(ARMED), WaitState(NEVER)])
    left = [plan.first]
    while left:
        state = left.pop()
        for byte in (*alphabet, other):
            after = _merged(plan.after_byte(state, bytes([byte])))
            if after not in found:
                if len(found) >= MAX_STATES:
                    return None
                found[after] = None
                left.append(after)
    return list(found)


def _merged(state: WaitState) -> WaitState:
    """Where the grammar holds, the device does not ask with which marker."""
    return WaitState(ARMED) if state.phase == ARMED else state


def _is_relevant(plan: WaitPlan, token: int) -> bool:
    """False only for tokens that all do the same: they end whatever mark was being written, and begin none."""
    text = plan.text_of(token)
    return (
        token == plan.opening
        or not text.strip(BLANKS)
        or text in plan.parts
        or text.startswith(plan.ends)
        or text.endswith(plan.beginnings)
        or any(mark in text for mark in plan.marks)
    )
