"""Who owns which page of the KV pool.  Knows numbers only: no tensors of keys or values, no requests.

A sequence gets all the pages it can ever need when it is admitted: so a running sequence never finds the pool empty, and no
round has to wait for the host to append pages.  Pages that are never reached are never touched.

Where no layer reads further back than a span, a sequence goes around a ring of pages: the page of tokens that nobody can reach
any more is written anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from specdec.limits import DUMMY_PAGE


def ring_pages(span: int, ahead: int, page_size: int) -> int:
    """Pages of a ring in which nothing is overwritten that anybody can still read.

    span: the most keys that one query reads in any layer of any model.  ahead: the most tokens one pass brings or one round
    writes, whichever is more.

    The slot of position p is also that of every position that lies a multiple of ring * page_size before it.  Let a pass or a
    round begin with L committed tokens: it writes to positions below L + ahead, so it destroys what stood below
    L + ahead - ring * page_size.  Every query of it, and of all that come later, stands at L or behind, so reads nothing below
    L - span + 1.  With ring * page_size >= span + ahead - 1 the two never meet: not within a pass either, all of whose tokens
    are stored before the first is read, nor for a draft that catches up behind a pause, whose L is where the pause began.

    Rounds in flight need nothing more: the device runs them one after the other, each from the L that it finds in memory, and
    the host, which knows of L a round late, has no part in it: tables are written once, at admission.
    """
    assert span >= 1 and ahead >= 1, (span, ahead)
    return -(-(span + ahead - 1) // page_size)


class PagePool:
    """Pages 1 .. num_pages - 1 of page_size tokens each.  Owners are any hashable keys.

    ring: the most pages a sequence needs, because it goes around them; None: a page for all its tokens.
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
        """Pages that sequences can own at all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def table_pages(self, tokens: int) -> int:
        """Entries in the page table of a sequence of so many tokens."""
        return -(-tokens // self.page_size)

    def pages_for(self, tokens: int) -> int:
        """Pages that such a sequence owns."""
        entries = self.table_pages(tokens)
        return entries if self.ring is None else min(entries, self.ring)

    def can_admit(self, tokens: int) -> bool:
        """Whether there are pages now for a sequence of at most `tokens` tokens, look-ahead included."""
        return self.pages_for(tokens) <= self.num_free

    def admit(self, owner: Hashable, tokens: int, have: int = 0) -> list[int]:
        """The pages of a new owner of at most `tokens` tokens, in order of position.  have: leading pages lent by others."""
        assert owner not in self._owned, f"{owner} is already admitted"
        count = self.pages_for(tokens) - have
        assert 0 <= count <= self.num_free, f"{tokens} tokens need {count} pages, {self.num_free} left"
        pages = [self._free.pop() for _ in range(count)]
        self._owned[owner] = set(pages)
        return pages

    def release(self, owner: Hashable) -> None:
        """Gives all pages back.  An owner that holds none is an error: it would hide a double release."""
        self._free.extend(sorted(self._owned.pop(owner), reverse=True))

    def give_back(self, owner: Hashable, pages: Iterable[int]) -> None:
        """Gives some of an owner's pages back."""
        for page in pages:
            self._owned[owner].remove(page)
            self._free.append(page)

    def pass_on(self, page: int, giver: Hashable, taker: Hashable) -> None:
        """A page changes its owner."""
        self._owned[giver].remove(page)
        self._owned.setdefault(taker, set()).add(page)
