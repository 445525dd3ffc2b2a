"""Keeps copies of ring pages for later prompts: what layers with a span need besides the pages that the prefix cache keeps.

A sequence writes its next tokens into the pages of its ring, so these pages can't be kept themselves.  They are copied instead,
each into a page that belongs to the node of the prefix cache with the same tokens.  A later prompt that begins with the node's
text gets the copies of its last span of keys, copied into its own ring.  A node without a copy is still worth keeping: any node
serves whose last span of pages has copies.

This module knows page numbers and nodes; it knows no tensor.  It orders copies, and somebody else makes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specdec.engine.pages.pool import PagePool
from specdec.engine.pages.prefix_cache import Node
from specdec.steps import CopyPages


class CopyOrders:
    """Copies of pages that are to be made before the next launch, in the order in which they were asked for.

    One step reads all its sources before it writes any target.  So a copy that reads what an earlier one writes, or writes what
    an earlier one writes, begins another step.
    """

    def __init__(self, group: int) -> None:
        self.group = group
        self.steps: list[CopyPages] = []

    def add(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Orders that page sources[i] is copied to page targets[i], for all i at once."""
        if not targets:
            return
        last = self.steps[-1] if self.steps else None
        if last is None or not set(last.targets).isdisjoint([*sources, *targets]):
            self.steps.append(CopyPages(self.group, tuple(sources), tuple(targets)))
        else:
            self.steps[-1] = CopyPages(self.group, (*last.sources, *sources), (*last.targets, *targets))


class RingCopies:
    """Owns pages of a pool whose sequences reuse rings, at most one for each node of the prefix cache.

    A copy may go at any time, because no sequence reads it: what a sequence needs was copied into its ring.  The copy that was
    used least recently goes first.

    pool: the pool of the rings.
    span: the most keys that one query reads.
    group: the number of the pool's group, for the steps.
    """

    def __init__(self, pool: PagePool, span: int, group: int) -> None:
        self.pool = pool
        self.orders = CopyOrders(group)
        # A sequence of n * page_size tokens reads back to position n * page_size - span + 1, also where its layers read chunks.
        self.window = -(-(span - 1) // pool.page_size)
        self._pages: OrderedDict[Node, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_free(self) -> int:
        """The number of pages of the pool that belong to no sequence."""
        return self.pool.num_free + len(self)

    def usable(self, path: Sequence[Node]) -> int:
        """The most leading pages of the path after which a sequence can begin: the last span of them has copies."""
        best = run = 0
        for length, node in enumerate(path, 1):
            run = run + 1 if node in self._pages else 0
            if run >= min(length, self.window):
                best = length
        return best

    def first_needed(self, length: int) -> int:
        """The first page that is still read after the first `length` pages of a text."""
        return max(0, length - self.window)

    def of(self, path: Sequence[Node]) -> list[int]:
        """The copies that a sequence needs which begins after this path.  They count as used from now on."""
        nodes = path[self.first_needed(len(path)) :]
        for node in nodes:
            self._pages.move_to_end(node)
        return [self._pages[node] for node in nodes]

    def keep(self, path: Sequence[Node], table: Sequence[int], first: int, reach: int, drafted: bool) -> None:
        """Copies what a sequence's ring still holds of the path's pages and has not been copied yet.

        path: the nodes of the sequence's text, from the first page on.
        table: the sequence's own pages, by position.
        first: the first page that the sequence has ever had keys and values of.
        reach: no launch so far has written to this position or to one after it.
        drafted: whether the sequence's pages hold the drafter's keys and values.
        """
        assert self.pool.ring is not None
        size = self.pool.page_size
        intact = max(first, -(-reach // size) - self.pool.ring)  # the first page that no later page has overwritten
        lacking = [i for i in range(intact, len(path)) if path[i] not in self._pages and path[i].drafted <= drafted]
        for node in path[intact:]:
            if node in self._pages:
                self._pages.move_to_end(node)
        lacking = lacking[max(0, len(lacking) - self.num_free) :]
        self.make_room(len(lacking))
        pages = self.pool.lend(self, len(lacking))
        self.orders.add([table[i] for i in lacking], pages)
        self._pages.update(zip([path[i] for i in lacking], pages, strict=True))

    def drop(self, node: Node) -> None:
        """Gives up the node's copy, if there is one."""
        if (page := self._pages.pop(node, None)) is not None:
            self.pool.give_back(self, [page])

    def drop_all(self) -> None:
        """Gives up all copies."""
        for node in list(self._pages):
            self.drop(node)

    def make_room(self, count: int) -> None:
        """Drops as many copies as it takes to have `count` free pages in the pool."""
        while self.pool.num_free < count:
            self.drop(next(iter(self._pages)))
