"""Where in a text its grammar begins to hold: after a thought, or after a marker that the model itself writes.

Until then every token may come, but for those that would write the marker and go on: the grammar holds from the marker's very
end.  This module knows bytes of tokens, and no grammar.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

BLANKS = b" \t\r\n"
MAX_KEPT = 1 << 16  # steps that are remembered
THOUGHT_MAY_OPEN, THOUGHT, FREE, NEVER, ARMED = range(5)


class Thought(NamedTuple):
    """The marks around a model's thought.  is_open: whether the text begins within one; otherwise it may begin with one."""

    open: str
    close: str
    is_open: bool = False


class Wait(NamedTuple):
    """Where a grammar begins to hold.

    thought: it holds after the thought, if there is one; None: this model writes none.
    markers: texts; it holds after the first of them.  None of them: from the answer's first token on.
    at_start: a marker counts at the beginning of the answer alone, blanks aside.
    keeps_marker: the grammar's texts begin with the marker.
    """

    thought: Thought | None = None
    markers: tuple[str, ...] = ()
    at_start: bool = False
    keeps_marker: bool = False


class WaitState(NamedTuple):
    """Where a text stands: one of the constants above, and its last bytes, as far as they may begin a mark.

    Where the grammar holds, the marker with which its own texts begin.
    """

    phase: int
    tail: bytes = b""


class TokenTexts:
    """The bytes of each token; those of a special token are its name."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._sorted = sorted(range(len(tokens)), key=tokens.__getitem__)
        self._keys = [tokens[token] for token in self._sorted]
        self._holding: dict[bytes, list[int]] = {}

    def beginning_with(self, text: bytes) -> list[int]:
        """The tokens that are longer than a text, and begin with it."""
        begin, end = bisect_left(self._keys, text + b"\0"), bisect_left(self._keys, text + b"\xff" * 8)
        return [token for token in self._sorted[begin:end] if len(self.tokens[token]) > len(text)]

    def holding(self, text: bytes) -> list[int]:
        """The tokens that hold a text and go on after it.  All are looked at, so what is found is kept."""
        if text not in self._holding:
            self._holding[text] = [token for token, held in enumerate(self.tokens) if text in held[:-1]]
        return self._holding[text]

    def spelled(self, text: bytes) -> list[int]:
        """Tokens that together are a text, the longest first.  ValueError if there are none."""
        found = list[int]()
        while text:
            sizes = (size for size in range(len(text), 0, -1) if self.id_of(text[:size]) is not None)
            size = next(sizes, 0)
            token = self.id_of(text[:size]) if size else None
            if token is None:
                raise ValueError(f"no tokens of the vocabulary write {text!r}")
            found.append(token)
            text = text[size:]
        return found

    def id_of(self, text: bytes) -> int | None:
        """The token that is exactly a text; None: there is none."""
        place = bisect_left(self._keys, text)
        return self._sorted[place] if place < len(self._keys) and self._keys[place] == text else None


class WaitPlan:
    """A Wait over a vocabulary: what a token does to a state, and which tokens may not come there.

    ValueError where a grammar's texts begin with a marker that no tokens write.
    """

    def __init__(self, wait: Wait, vocabulary: TokenTexts) -> None:
        self._markers = tuple(marker.encode() for marker in wait.markers)
        for marker in self._markers if wait.keeps_marker else ():
            vocabulary.spelled(marker)
        self._at_start, self._keeps_marker, self._vocabulary = wait.at_start, wait.keeps_marker, vocabulary
        thought = wait.thought
        self._open, self._close = (thought.open.encode(), thought.close.encode()) if thought is not None else (b"", b"")
        self.opening = vocabulary.id_of(self._open) if thought is not None and not thought.is_open else None
        self.waits = bool(self._markers)
        self.first = WaitState(FREE if self.waits else ARMED)
        if thought is not None:
            self.first = WaitState(THOUGHT if thought.is_open else THOUGHT_MAY_OPEN)
            if not thought.is_open and not self.waits and self.opening is None:
                self.first = WaitState(ARMED)  # no token of its own opens a thought, and all others are the grammar's
        self._steps: dict[tuple[WaitState, int], WaitState] = {}
        self._crossing: dict[WaitState, np.ndarray | None] = {}
        self.vocab_size = len(vocabulary.tokens)

    @cached_property
    def marks(self) -> tuple[bytes, ...]:
        """Those around a thought, and the markers."""
        return tuple(mark for mark in (self._open, self._close, *self._markers) if mark)

    @cached_property
    def parts(self) -> frozenset[bytes]:
        """All that stands within a mark."""
        places = [(mark, begin, end) for mark in self.marks for end in range(1, len(mark) + 1) for begin in range(end)]
        return frozenset(mark[begin:end] for mark, begin, end in places)

    @cached_property
    def beginnings(self) -> tuple[bytes, ...]:
        """With what marks begin."""
        return tuple(sorted({mark[:size] for mark in self.marks for size in range(1, len(mark))}))

    @cached_property
    def ends(self) -> tuple[bytes, ...]:
        """With what marks end."""
        return tuple(sorted({mark[size:] for mark in self.marks for size in range(1, len(mark))}))

    def text_of(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._vocabulary.tokens[token]

    def spelled(self, text: bytes) -> list[int]:
        """Tokens that together are a text."""
        return self._vocabulary.spelled(text)

    def step(self, state: WaitState, token: int) -> WaitState:
        """The state after a token."""
        if state.phase in (NEVER, ARMED):
            return state
        found = self._steps.get((state, token))
        if found is None:
            if len(self._steps) >= MAX_KEPT:
                self._steps.clear()
            found = self._steps[state, token] = self._after(state, token)
        return found

    def is_first_of_answer(self, state: WaitState, token: int) -> bool:
        """Whether the grammar holds for a token because no thought opens there."""
        return state.phase == THOUGHT_MAY_OPEN and not self.waits and token != self.opening

    def needs_mask(self, state: WaitState) -> bool:
        """Whether anything but the end of the text is banned at a state, or its grammar holds there."""
        begins = state.phase == ARMED or (state.phase == THOUGHT_MAY_OPEN and not self.waits)
        return begins or self.crossing(state) is not None

    def crossing(self, state: WaitState) -> np.ndarray | None:
        """[X] int32: the tokens that would write the mark for which a state waits, and go on; None: there is none."""
        if state not in self._crossing:
            self._crossing[state] = self._words(state)
        return self._crossing[state]

    def _after(self, state: WaitState, token: int) -> WaitState:
        if not 0 <= token < len(self._vocabulary.tokens):  # a draft may be any number
            return WaitState(NEVER)
        for byte in self._vocabulary.tokens[token]:
            if state.phase == ARMED:
                return WaitState(NEVER)  # nobody may choose such a token: see `crossing`
            state = self.after_byte(state, bytes([byte]))
        return state

    def after_byte(self, state: WaitState, byte: bytes) -> WaitState:
        """The state after one more byte of the text."""
        if state.phase == THOUGHT_MAY_OPEN:
            return self._opened(state, byte)
        if state.phase == THOUGHT:
            tail = longest_beginning(state.tail + byte, (self._close,))
            return WaitState(THOUGHT, tail) if tail != self._close else WaitState(FREE if self.waits else ARMED)
        if state.phase == FREE:
            return self._marked(state, byte)
        return state

    def _opened(self, state: WaitState, byte: bytes) -> WaitState:
        if not state.tail and byte in BLANKS:
            return state
        tail = state.tail + byte
        if tail == self._open:
            return WaitState(THOUGHT)
        if self._open.startswith(tail):
            return WaitState(THOUGHT_MAY_OPEN, tail)
        state = WaitState(FREE)
        for number in range(len(tail)):
            state = self.after_byte(state, tail[number : number + 1])
        return state

    def _marked(self, state: WaitState, byte: bytes) -> WaitState:
        if self._at_start:
            if not state.tail and byte in BLANKS:
                return state
            tail = state.tail + byte
            if not any(marker.startswith(tail) for marker in self._markers):
                return WaitState(NEVER)
        else:
            tail = longest_beginning(state.tail + byte, self._markers)
        if tail in self._markers:
            return WaitState(ARMED, tail if self._keeps_marker else b"")
        return WaitState(FREE, tail)

    def _words(self, state: WaitState) -> np.ndarray | None:
        marks = self._markers
        if state.phase == THOUGHT and not self.waits:
            marks = (self._close,)
        elif state.phase not in (FREE, THOUGHT_MAY_OPEN):
            return None
        candidates = set[int]()
        for mark in marks:
            candidates.update(self._vocabulary.holding(mark))
            for size in range(1, min(len(state.tail), len(mark) - 1) + 1):
                if mark.startswith(state.tail[-size:]):
                    candidates.update(self._vocabulary.beginning_with(mark[size:]))
        crossing = [token for token in candidates if self._crosses(state, token)]
        if not crossing:
            return None
        bits = np.zeros(-(-len(self._vocabulary.tokens) // 32) * 32, np.uint8)
        bits[crossing] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _crosses(self, state: WaitState, token: int) -> bool:
        text = self._vocabulary.tokens[token]
        for number in range(len(text)):
            state = self.after_byte(state, text[number : number + 1])
            if state.phase == ARMED:
                return number + 1 < len(text)
        return False


def longest_beginning(text: bytes, marks: Sequence[bytes]) -> bytes:
    """The longest end of a text with which a mark begins."""
    for begin in range(max(0, len(text) - max(map(len, marks), default=0)), len(text)):
        if any(mark.startswith(text[begin:]) for mark in marks):
            return text[begin:]
    return b""
