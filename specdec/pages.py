"""Who owns which page of the KV pool.  Knows numbers only: no tensors of keys or values, no requests.

A sequence is promised all the pages it can ever need when it is admitted, and takes them round by round: so a running
sequence never finds the pool empty, and pages it does not come to need are never touched.
"""

from __future__ import annotations

from collections.abc import Hashable

DUMMY_PAGE = 0  # padded rows of a batch read and write here; it belongs to nobody


class PagePool:
    """Pages 1 .. num_pages - 1 of page_size tokens each.  Owners are any hashable keys."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages >= 2 and page_size >= 1, (num_pages, page_size)
        self.page_size = page_size
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._owned: dict[Hashable, list[int]] = {}
        self._promised: dict[Hashable, int] = {}

    @property
    def capacity(self) -> int:
        """Pages that sequences can own at all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_unpromised(self) -> int:
        """Free pages that no admitted sequence may still claim."""
        return self.capacity - sum(self._promised.values())

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def can_admit(self, tokens: int) -> bool:
        """Whether a sequence of at most `tokens` tokens, look-ahead included, can be promised its pages now."""
        return self.pages_for(tokens) <= self.num_unpromised

    def admit(self, owner: Hashable, tokens: int) -> None:
        """Promises pages for at most `tokens` tokens."""
        assert owner not in self._promised, f"{owner} is already admitted"
        assert self.can_admit(tokens), f"{tokens} tokens need {self.pages_for(tokens)} pages, {self.num_unpromised} left"
        self._promised[owner] = self.pages_for(tokens)
        self._owned[owner] = []

    def reserve(self, owner: Hashable, tokens: int) -> list[int]:
        """Takes pages until `tokens` tokens fit.  Returns all pages of the owner, in order of position."""
        pages = self._owned[owner]
        wanted = self.pages_for(tokens)
        assert wanted <= self._promised[owner], f"{owner} was promised {self._promised[owner]} pages, asks for {wanted}"
        while len(pages) < wanted:
            pages.append(self._free.pop())
        return pages

    def release(self, owner: Hashable) -> None:
        """Gives all pages back.  An owner that holds none is an error: it would hide a double release."""
        self._free.extend(reversed(self._owned.pop(owner)))
        del self._promised[owner]
