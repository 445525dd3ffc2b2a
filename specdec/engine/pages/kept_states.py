"""Keeps states of recurrent layers for later prompts: what these layers need besides the pages that the prefix cache keeps.

A page of keys is worth nothing to such a target without the state after the page's last token.  A state is large, so only few
are kept, each under a number of its own, and each belongs to the node of the prefix cache after whose page it stands.  A text
begins after the longest kept state whose pages are there too.  The state that was used least recently makes room for the next,
but one after which only a single text goes on goes first, once a later state of that text is kept: conversations then need one
state each, where two would be needed.

A row reads its state in its first chunk, and a chunk writes a state while it runs.  So a number stays as it is from a row's
entry until its first chunk has been launched, and what a chunk is to write is found only once the chunk has been launched.

Where another row holds the pages with which a text begins, the cache takes the text's other pages once its row leaves.  A state
after them is offered until then; it goes before all that can be found.

This module knows numbers, nodes and texts; where in a text a state is kept is decided in state_places.py.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.engine.pages.prefix_cache import Node, PrefixCache
from specdec.engine.pages.state_places import LEAST_KEPT, STATE_EVERY, StatePlaces, distance
from specdec.limits import RESERVED_STATES, ZEROS


class KeptStates:
    """Owns numbers of states, and says which of them hold the state after which node's page.

    numbers: may be none; then nothing is kept.
    """

    def __init__(self, numbers: range) -> None:
        assert not numbers or numbers[0] >= RESERVED_STATES
        self.numbers, self.total = numbers, len(numbers)
        self._free = list(numbers[::-1])
        self._numbers: OrderedDict[Node, int] = OrderedDict()  # the least recently used first
        self._readers = Counter[int]()  # rows that are still to read a number
        self._offered: OrderedDict[Hashable, int] = OrderedDict()  # by row, the oldest first

    @property
    def num_free(self) -> int:
        """How many numbers hold no state, and will hold none after the next launch."""
        return len(self._free)

    def usable(self, path: Sequence[Node]) -> int:
        """The most leading pages of the path after which a text can begin: those before the last kept state."""
        return next((length for length in range(len(path), 0, -1) if path[length - 1] in self._numbers), 0)

    def borrow(self, node: Node) -> int:
        """The number of the node's state.  It counts as used now, and stays as it is until it is given back."""
        self._numbers.move_to_end(node)
        number = self._numbers[node]
        self._readers[number] += 1
        return number

    def give_back(self, number: int) -> None:
        """A row has read the state, or never will."""
        self._readers[number] -= 1
        assert self._readers[number] >= 0
        if not self._readers[number]:
            del self._readers[number]

    def take(self) -> int | None:
        """A number under which a chunk may keep a state; None: rows are still to read all of them."""
        if not self._free and self._offered:
            return self._offered.popitem(last=False)[1]
        if not self._free:
            idle = (node for node, number in self._numbers.items() if number not in self._readers)
            if (node := next(idle, None)) is None:
                return None
            self.drop(node)
        return self._free.pop()

    def enter(self, node: Node | None, number: int) -> None:
        """The state after the node's page is under this number, or soon will be.  None: nobody can find it.

        A node that has a state keeps the one that it has.
        """
        if node is None or node in self._numbers:
            self._free.append(number)
        else:
            self._numbers[node] = number
        if node is not None:
            self._numbers.move_to_end(node)

    def offer(self, owner: Hashable, number: int) -> None:
        """A row has a state under this number that nobody can find yet, in place of an earlier one."""
        if (earlier := self.withdraw(owner)) is not None:
            self.enter(None, earlier)
        self._offered[owner] = number

    def withdraw(self, owner: Hashable) -> int | None:
        """The number of what a row has offered, if that is still there."""
        return self._offered.pop(owner, None)

    def put_first(self, node: Node) -> None:
        """The node's state, if there is one, makes room before all others."""
        if node in self._numbers:
            self._numbers.move_to_end(node, last=False)

    def drop(self, node: Node) -> None:
        """Gives up the node's state, if there is one.  No row is still to read it, because such a row uses the node."""
        if (number := self._numbers.pop(node, None)) is not None:
            assert number not in self._readers
            self._free.append(number)


class Promise(NamedTuple):
    """A number under which a part that has not been launched keeps the state after these tokens, the first ones of its text.

    salt: the text's, see PrefixCache.
    """

    number: int
    tokens: Sequence[int]
    salt: str | None = None


@dataclass
class StateUse:
    """How one row uses kept states.

    number: of the state with which its text goes on, or ZEROS.  is_read: whether the chunk that reads it has been launched.
    last: the node after which it has begun or has kept its last state, if no other text was known to share that.
    places: where states of its text are kept.  promised: what its part in the next launch keeps, if it keeps a state.
    offered: the tokens after which it has offered a state, and the one after them.  salt: the text's.
    """

    number: int
    last: Node | None
    places: StatePlaces
    is_read: bool = False
    promised: Promise | None = None
    offered: Sequence[int] = ()
    salt: str | None = None


class TextStates:
    """The states of rows' texts: with which kept one each goes on, and which its chunks keep.

    every, least: see StatePlaces, in tokens.  drafted: whether a state is one of the drafter, too.
    """

    def __init__(self, kept: KeptStates, cache: PrefixCache, drafted: bool = False) -> None:
        self.kept, self.cache, self.drafted = kept, cache, drafted
        self.every, self.least = STATE_EVERY, LEAST_KEPT
        self._rows: dict[Hashable, StateUse] = {}

    def begin(self, owner: Hashable, path: Sequence[Node], tokens: int, shared: int, salt: str | None = None) -> None:
        """A text of so many tokens gets a row, and goes on after the path.  shared: see PrefixHit.  salt: see PrefixCache."""
        size = self.cache.pool.page_size
        number = self.kept.borrow(path[-1]) if path else ZEROS
        places = StatePlaces(len(path) * size, (tokens - 1) // size * size, distance(self.every, size, tokens, self.kept.total))
        places.shared[owner] = shared
        self._rows[owner] = StateUse(number, path[-1] if path else None, places, salt=salt)

    def number(self, owner: Hashable) -> int:
        """The number of the state with which the text goes on."""
        return self._rows[owner].number

    def will_keep(self, owner: Hashable, place: int, done: int, who: Hashable) -> bool:
        """Whether the text will probably keep its state after `place` tokens if somebody else asks, whose text begins alike.

        done: of so many of its tokens chunks have been launched.
        """
        places = self._rows[owner].places
        if not self.kept.total or place <= done or place - places.begun < self.least:
            return False
        places.shared[who] = place
        return True

    def promise(self, owner: Hashable, text: Sequence[int], start: int, end: int) -> tuple[int, int] | None:
        """What a part of the text keeps, from token `start` up to `end`: see PromptPart.keep.

        Of parts in one launch that come to the same state, one keeps it.
        """
        row = self._rows[owner]
        place = row.places.choose(start, end, self.least) if self.kept.total else None
        if place is None:
            return None
        tokens = text[:place]
        promises = (other.promised for other in self._rows.values() if other.promised is not None)
        is_kept = any(other.tokens == tokens and other.salt == row.salt for other in promises)
        if is_kept or (number := self.kept.take()) is None:
            return None
        row.promised, row.places.begun = Promise(number, tokens, row.salt), place
        return number, place - start

    def ran(self, owner: Hashable, tokens: Sequence[int], drafted: bool = True) -> None:
        """A part of the text has been launched, and what can be kept of its pages is in the cache.

        tokens: up to the end of the part, and the token after it if it is known.  drafted: whether the drafter reads the part.
        """
        row = self._rows[owner]
        self._read(row)
        if row.promised is not None and self.drafted and not drafted:  # a state that the drafter has no part in
            self.kept.enter(None, row.promised.number)
            row.promised = None
        if row.promised is not None:
            number, place = row.promised.number, len(row.promised.tokens)
            begun = tokens[: place + 1]
            assert len(begun) == place + 1, "the token after a page is known"
            if (node := self._node(begun, row.salt)) is None:
                row.offered = begun
                self.kept.offer(owner, number)
            else:
                self.kept.enter(node, number)
                if row.last is not None and len(row.last.children) == 1:
                    self.kept.put_first(row.last)
                row.last = None if place in row.places.shared.values() else node
            row.promised = None

    def leave(self, owner: Hashable) -> None:
        """The text loses its row, after the cache has got its pages.

        What a part was to keep that has not been launched is kept by nobody.
        """
        row = self._rows.pop(owner)
        self._read(row)
        if row.promised is not None:
            self.kept.enter(None, row.promised.number)
        if (number := self.kept.withdraw(owner)) is not None:
            self.kept.enter(self._node(row.offered, row.salt), number)

    def _node(self, tokens: Sequence[int], salt: str | None) -> Node | None:
        """The node after whose page all of these tokens but the last are computed; its pages may be those of another text."""
        path = self.cache.find(tokens, False, salt)
        return path[-1] if path and len(path) * self.cache.pool.page_size == len(tokens) - 1 else None

    def _read(self, row: StateUse) -> None:
        if not row.is_read and row.number != ZEROS:
            self.kept.give_back(row.number)
        row.is_read = True
