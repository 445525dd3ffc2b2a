"""A runner without a device that keeps states by number, beside slots: whoever goes on with a state must find that of its text.

It knows of each number which text's state it holds, as a device would: a chunk reads what rows go on with, and writes what its
parts keep, and what a chunk that failed has written is worth nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from specdec.attention.kinds import LayerKind
from specdec.engine.pages.kept_states import KeptStates
from specdec.engine.request import Request
from specdec.limits import ZEROS
from specdec.steps import EnterRows, RunChunk
from toolkit.inside.memory import Memory, Written, balanced
from toolkit.pages import nodes_of


class StateMemory(Memory):
    """numbers: those of kept states.  begun: of requests that ran when they had a row first, after how many tokens they did."""

    most = 10**6

    def __init__(self, numbers: range, page_size: int, rng: random.Random, vocab: int) -> None:
        super().__init__([LayerKind()], page_size, rng, vocab)
        self.numbers, self.kept = numbers, dict[int, Any]()
        self.begun, self.entered = dict[Request, int](), Counter[Request]()
        self.hits = self.writes = 0

    def EnterRows(self, step: EnterRows) -> None:
        super().EnterRows(step)
        self.entered.update(self.rows[entry.row].request for entry in step.entries)

    def RunChunk(self, step: RunChunk) -> Written:
        written = dict[int, int]()
        for part in step.parts:
            if part.keep is not None:
                number, count = part.keep
                assert number in self.numbers and number not in written and 1 <= count <= len(part.token_ids)
                assert (part.start + count) % self.page_size == 0, "no page ends there"
                written[number] = text_up_to(self.rows[part.row].request, part.start + count)
        for part in step.parts:
            row = self.rows[part.row]
            if row.length < 0:
                held = self.kept[row.entry.state] if row.entry.state != ZEROS else text_up_to(row.request, 0)
                assert held == text_up_to(row.request, part.start), "the state of another text"
                assert row.entry.state not in written, "it is overwritten while it is read"
                self.hits += row.entry.state != ZEROS
                if self.entered[row.request] == 1:
                    self.begun.setdefault(row.request, part.start)
        self.kept.update(dict.fromkeys(written, "what a chunk left that failed"))
        emitted = super().RunChunk(step)
        self.kept.update(written)
        self.writes += len(written)
        return emitted

    def next_token(self, text: list[int]) -> int:
        """Of long texts, one that is found quickly."""
        return super().next_token(text) if len(text) < 300 else sum(text) % self.vocab


def text_up_to(request: Request, tokens: int) -> int:
    return hash(tuple(request.text[:tokens]))


def states_balance(engine: Any, memory: StateMemory) -> None:
    """Each number is free or belongs to one node that is there, and only rows that are still to read it keep it as it is."""
    balanced(engine)
    admission = engine.scheduler.admission
    kept: KeptStates = admission.text_states.kept
    held = [*kept._numbers.values(), *kept._offered.values()]
    assert sorted([*held, *kept._free]) == list(memory.numbers)
    assert set(kept._numbers) <= set(nodes_of(admission.cache))
    waiting = [row.entry.state for row in memory.rows.values() if row.length < 0 and row.entry.state != ZEROS]
    assert sorted(kept._readers.elements()) == sorted(waiting)
    usage = admission.usage()
    assert usage.states_used == len(held) and usage.states_total == len(memory.numbers)
