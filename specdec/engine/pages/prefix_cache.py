"""Keeps pages for prompts that begin as earlier ones did.

This module knows token ids and page numbers; it knows no tensors and no requests.

A page is identified by its tokens, by all tokens before it, and by the token right after it, its successor.  The successor
matters because the drafter's key and value of a page's last token are computed from the embedding of the next token: two texts
that go on differently can't share that page.  The pages form a tree whose branches are tuples of page_size + 1 token ids (a
page's tokens and its successor).  Ids are compared themselves, not hashes of them, so no two texts can be confused.

A text may have a salt: texts of other salts, and those without one, share no page with it.  The salt is part of its first
page's key.

Only full pages whose successor is known are kept.  Nobody writes to a cached page again: a sequence that reads it writes to
later pages only.  A page stays until the pool needs it; the least recently used page goes first.

A page of a text that does not speculate lacks the drafter's keys and values.  `drafted` says which pages have them, and a text
that speculates finds only those.  No page with them comes after a page without.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from specdec.engine.pages.pool import PagePool

Key = tuple[int | str, ...]


@dataclass(eq=False)
class Node:
    """One cached page; the pages before it are those of its parent, its parent's parent, and so on."""

    key: Key  # the page's tokens and its successor; of a text's first page its salt too
    parent: Node | None
    page: int
    drafted: bool  # whether the page holds the drafter's keys and values too
    users: int = 0  # how many sequences read this page or one after it
    children: dict[Key, Node] = field(default_factory=dict)


class PrefixCache:
    """Owns pages of the pool.  A page that a sequence uses is never evicted; a page that is idle can be evicted at any time.

    on_change: called with a node when it gets a page with the drafter's keys and values in place of one without, or is evicted.
    on_evict: called with a node when it is evicted.  What somebody else keeps for the node is then worthless.
    """

    def __init__(
        self, pool: PagePool, on_change: Callable[[Node], None] | None = None, on_evict: Callable[[Node], None] | None = None
    ) -> None:
        self.pool, self._on_change, self._on_evict = pool, on_change, on_evict
        self.root = Node((), None, -1, drafted=True)
        # The nodes that nobody uses, in the order in which they became idle.  A node becomes idle before its parent does, so
        # the first node is always a leaf.
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self.changes = 0  # by which another look at a text may find other nodes

    @property
    def num_idle(self) -> int:
        """The number of pages that could be evicted."""
        return len(self._idle)

    def find(self, tokens: Sequence[int], drafted: bool, salt: str | None = None) -> list[Node]:
        """The cached pages that the text begins with, in order.  drafted: only those with the drafter's keys and values."""
        path: list[Node] = []
        node = self.root
        for key in page_keys(tokens, self.pool.page_size, salt):
            child = node.children.get(key)
            if child is None or (drafted and not child.drafted):
                break
            path.append(child)
            node = child
        return path

    def insert(
        self,
        owner: Hashable,
        held: Node,
        tokens: Sequence[int],
        pages: Sequence[int],
        drafted: bool,
        leaves: bool = False,
        salt: str | None = None,
    ) -> Node:
        """Takes over the owner's full pages of this text.  Returns the last page's node, which the owner now uses, not `held`.

        held: the node that the owner has used so far.
        pages: the page numbers of the text, in order, from its very beginning.
        drafted: whether these pages hold the drafter's keys and values.
        leaves: whether the owner gives all its pages back now.

        A cached page without the drafter's keys and values is replaced by a page that has them, unless some sequence reads it:
        then this page and all pages after it stay the owner's.  A page that is kept as it should be stays where the owner
        leaves.  Otherwise the owner would hold two copies of it: the kept one is replaced if no sequence reads it, and if one
        does, this page and all pages after it stay the owner's.  An owner can offer these again when it leaves.
        """
        node = self.root
        for key, page in zip(page_keys(tokens, self.pool.page_size, salt), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                self.changes += 1
                child = node.children[key] = Node(key, node, page, drafted)
                self._idle[child] = None
                self.pool.pass_on(page, owner, self)
            elif drafted and not child.drafted:
                if child.users:
                    break
                if self._on_change is not None:
                    self._on_change(child)
                self._swap(child, page, owner)
                child.drafted = True
                self.changes += 1
            elif child.page != page and not leaves:
                if child.users or child.drafted != drafted:
                    break
                self._swap(child, page, owner)
            node = child
        self.use(node)
        self.leave(held)
        return node

    def _swap(self, node: Node, page: int, owner: Hashable) -> None:
        """Takes over an owner's page in place of the one that is kept."""
        self.pool.give_back(self, [node.page])
        self.pool.pass_on(page, owner, self)
        node.page = page

    def path(self, node: Node) -> list[Node]:
        """The nodes from the first page to this one, in order."""
        return [*self._upwards(node)][::-1]

    def _upwards(self, node: Node) -> Iterator[Node]:
        while node.parent is not None:
            yield node
            node = node.parent

    def use(self, node: Node) -> None:
        """Records that one more sequence reads this page and all pages before it."""
        for at in self._upwards(node):
            if not at.users:
                del self._idle[at]
            at.users += 1

    def leave(self, node: Node) -> None:
        """Records that one sequence no longer reads this page and all pages before it."""
        for at in self._upwards(node):
            at.users -= 1
            assert at.users >= 0
            if not at.users:
                self._idle[at] = None

    def evict(self, count: int) -> None:
        """Gives `count` idle pages back to the pool, the least recently used first."""
        for _ in range(count):
            node, _nothing = self._idle.popitem(last=False)
            assert not node.children and node.parent is not None, "a page became idle before a page after it"
            del node.parent.children[node.key]
            self.changes += 1
            for told in (self._on_change, self._on_evict):
                if told is not None:
                    told(node)
            self.pool.give_back(self, [node.page])


def page_keys(tokens: Sequence[int], page_size: int, salt: str | None = None) -> Iterator[Key]:
    """The keys of a text's full pages whose successor is known: each is a page's tokens and the token after them, and the first
    one has the text's salt too.

    They are made one by one, because a long text that waits is looked up before each launch, and few of its pages may be kept.

    The text's last token is in a key only as a successor.  So a text whose pages are all found still has a token to compute,
    and with it the logits of the next one.
    """
    for start in range(0, len(tokens) - page_size, page_size):
        key: Key = tuple(tokens[start : start + page_size + 1])
        yield key if start or salt is None else (*key, salt)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading elements two lists share; found by bisection, because comparing slices is much faster than a loop."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def common_pages(a: Sequence[int], b: Sequence[int], page_size: int) -> int:
    """How many leading page keys two texts share."""
    return max(0, common_length(a, b) - 1) // page_size
