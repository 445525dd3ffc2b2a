"""Who owns which page of the KV pool.  Knows numbers only: no tensors of keys or values, no requests.

A sequence gets all the pages it can ever need when it is admitted: so a running sequence never finds the pool empty, and no
round has to wait for the host to append pages.  Pages that are never reached are never touched.
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

    @property
    def capacity(self) -> int:
        """Pages that sequences can own at all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def can_admit(self, tokens: int) -> bool:
        """Whether there are pages now for a sequence of at most `tokens` tokens, look-ahead included."""
        return self.pages_for(tokens) <= self.num_free

    def admit(self, owner: Hashable, tokens: int) -> list[int]:
        """The pages of a new owner of at most `tokens` tokens, in order of position."""
        assert owner not in self._owned, f"{owner} is already admitted"
        assert self.can_admit(tokens), f"{tokens} tokens need {self.pages_for(tokens)} pages, {self.num_free} left"
        self._owned[owner] = [self._free.pop() for _ in range(self.pages_for(tokens))]
        return self._owned[owner]

    def release(self, owner: Hashable) -> None:
        """Gives all pages back.  An owner that holds none is an error: it would hide a double release."""
        self._free.extend(reversed(self._owned.pop(owner)))
