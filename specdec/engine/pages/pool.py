"""Records who owns which page of the KV pool.  This module knows numbers only: no tensors of keys or values, no requests.

A sequence gets pages when it is admitted, and more as it grows.  Nobody touches a page that its sequence never reaches.

For layers that read no further back than a span of keys, a sequence reuses a ring of pages: when nobody can read a page's
tokens any more, the sequence writes its next tokens into that page.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from specdec.limits import DUMMY_PAGE


def ring_pages(span: int, ahead: int, page_size: int) -> int:
    """The smallest number of pages in a ring such that no key is overwritten that anybody can still read.

    span: the most keys that one query reads in any layer of any model.
    ahead: the most tokens that one chunk of a prompt brings or one round writes, whichever is more.

    Position p has the same slot as every position that lies a multiple of ring * page_size before it.  Let a chunk or a round
    begin with L committed tokens.  It writes to positions below L + ahead, so it destroys the keys of positions below
    L + ahead - ring * page_size.  All its queries, and all later ones, stand at position L or after it, so they read no key
    below position L - span + 1.  If ring * page_size >= span + ahead - 1, no query reads a key that has been destroyed.  This
    holds within a chunk too, although a chunk stores all its keys before it reads the first one.  And it holds for a drafter
    that catches up after a pause, if L is taken to be where the pause began.

    Rounds in flight need no more room.  The device runs them one after the other, and each begins from the L that it finds in
    memory.  The host learns L a round late, but it takes no part in this, because a sequence gets its ring whole, at admission.
    """
    assert span >= 1 and ahead >= 1, (span, ahead)
    return -(-(span + ahead - 1) // page_size)


class PagePool:
    """Owns pages 1 to num_pages - 1 of page_size tokens each, and lends them to owners, which are any hashable keys.

    ring: the most pages that one sequence needs, because it reuses them; None: a sequence needs pages for all its tokens.
    """

    def __init__(self, num_pages: int, page_size: int, ring: int | None = None) -> None:
        assert num_pages >= 2 and page_size >= 1 and (ring is None or ring >= 1), (num_pages, page_size, ring)
        self.page_size = page_size
        self.num_pages = num_pages
        self.ring = ring
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._owned: dict[Hashable, set[int]] = {}

    @property
    def capacity(self) -> int:
        """The number of pages that sequences can own altogether."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """The number of pages that nobody owns."""
        return len(self._free)

    def table_pages(self, tokens: int) -> int:
        """The number of entries in the page table of a sequence of `tokens` tokens."""
        return -(-tokens // self.page_size)

    def pages_for(self, tokens: int) -> int:
        """The number of pages that such a sequence needs; with a ring, several entries of its table share a page."""
        entries = self.table_pages(tokens)
        return entries if self.ring is None else min(entries, self.ring)

    def can_admit(self, tokens: int) -> bool:
        """Whether enough pages are free now for a sequence of at most `tokens` tokens, look-ahead included."""
        return self.pages_for(tokens) <= self.num_free

    def admit(self, owner: Hashable, tokens: int, have: int = 0) -> list[int]:
        """Gives free pages to a new owner of at most `tokens` tokens.  Returns their numbers, in order of position.

        have: how many leading pages the owner borrows from somebody else and so does not need.
        """
        assert owner not in self._owned, f"{owner} is already admitted"
        count = self.pages_for(tokens) - have
        assert 0 <= count <= self.num_free, f"{tokens} tokens need {count} pages, {self.num_free} left"
        self._owned[owner] = set()
        return self.lend(owner, count)

    def lend(self, owner: Hashable, count: int) -> list[int]:
        """Gives `count` free pages to an owner, who may own others already."""
        assert count <= self.num_free, (count, self.num_free)
        pages = [self._free.pop() for _ in range(count)]
        self._owned.setdefault(owner, set()).update(pages)
        return pages

    def release(self, owner: Hashable) -> None:
        """Takes all pages of the owner back.  KeyError if the owner is unknown, so that no second release goes unnoticed."""
        self._free.extend(sorted(self._owned.pop(owner), reverse=True))

    def give_back(self, owner: Hashable, pages: Iterable[int]) -> None:
        """Takes some of an owner's pages back."""
        for page in pages:
            self._owned[owner].remove(page)
            self._free.append(page)

    def pass_on(self, page: int, giver: Hashable, taker: Hashable) -> None:
        """Makes `taker` the owner of a page that `giver` owns."""
        self._owned[giver].remove(page)
        self._owned.setdefault(taker, set()).add(page)
