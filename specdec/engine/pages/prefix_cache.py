"""Pages kept for prompts that begin as earlier ones did.  Knows token ids and page numbers: no tensors, no requests.

A page is known by its tokens, all tokens before it, and the token behind it: the draft's KV row of a page's last token holds
the embedding of the next one, so two texts that go on differently do not share that page.  Tokens are compared themselves:
a tree of pages whose branches are tuples of page_size + 1 ids (a page and its successor), so no two texts can be confused.

Only full pages whose successor is known are kept, and nobody writes to them again: whoever reads one goes on behind it.
Pages stay until the pool needs them, and go least recently used first.

Pages written without a draft have no draft rows: `drafted` says which have, and texts that speculate find no others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from specdec.engine.pages.pool import PagePool

Key = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """One page, behind those of its parent.  users: sequences that read this page or one behind it."""

    key: Key
    parent: Node | None
    page: int
    drafted: bool
    users: int = 0
    children: dict[Key, Node] = field(default_factory=dict)


class PrefixCache:
    """Owns pages of the pool.  What is in use is never evicted; `idle` pages are as good as free."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.root = Node((), None, -1, drafted=True)
        # Nodes nobody uses, in the order they fell idle, pages behind before those in front: the first is always a leaf.
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Pages that could be evicted."""
        return len(self._idle)

    def find(self, tokens: Sequence[int], drafted: bool) -> list[Node]:
        """The kept pages that the text begins with, in order.  drafted: only those with draft rows."""
        path: list[Node] = []
        node = self.root
        for key in page_keys(tokens, self.pool.page_size):
            child = node.children.get(key)
            if child is None or (drafted and not child.drafted):
                break
            path.append(child)
            node = child
        return path

    def insert(self, owner: Hashable, held: Node, tokens: Sequence[int], pages: Sequence[int], drafted: bool) -> Node:
        """Takes over the owner's full pages of this text.  Returns the node of the last, which it now uses instead of `held`.

        pages: of the text, in order, from its very beginning.  What is kept already stays, and the owner keeps its own copy;
        but a page without draft rows makes way for one that has them.
        """
        node = self.root
        for key, page in zip(page_keys(tokens, self.pool.page_size), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, node, page, drafted)
                self._idle[child] = None
                self.pool.pass_on(page, owner, self)
            elif drafted and not child.drafted:
                assert not child.users, "sequences with and without a draft never run together"
                self.pool.give_back(self, [child.page])
                self.pool.pass_on(page, owner, self)
                child.page, child.drafted = page, True
            node = child
        self.use(node)
        self.leave(held)
        return node

    def use(self, node: Node) -> None:
        """One more sequence reads this page and all before it."""
        at: Node | None = node
        while at is not None and at is not self.root:
            if not at.users:
                del self._idle[at]
            at.users += 1
            at = at.parent

    def leave(self, node: Node) -> None:
        """That sequence is gone."""
        at: Node | None = node
        while at is not None and at is not self.root:
            at.users -= 1
            assert at.users >= 0
            if not at.users:
                self._idle[at] = None
            at = at.parent

    def evict(self, count: int) -> None:
        """Gives so many pages back to the pool, the least recently used first."""
        for _ in range(count):
            node, _nothing = self._idle.popitem(last=False)
            assert not node.children and node.parent is not None, "a page is used no later than those behind it"
            del node.parent.children[node.key]
            self.pool.give_back(self, [node.page])


def page_keys(tokens: Sequence[int], page_size: int) -> list[Key]:
    """One for each full page whose successor is known: its tokens, and the one behind.  The text's last token is in none
    but as a successor, so that something is left to compute."""
    return [tuple(tokens[start : start + page_size + 1]) for start in range(0, len(tokens) - page_size, page_size)]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading elements two lists share.  Halving: comparing slices is much faster than a loop."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def common_pages(a: Sequence[int], b: Sequence[int], page_size: int) -> int:
    """How many leading page keys two texts share."""
    return max(0, common_length(a, b) - 1) // page_size
