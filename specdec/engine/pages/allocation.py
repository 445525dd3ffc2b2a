"""Plain data of pages: what one request holds, what the prefix cache holds of its text, and how many are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specdec.engine.pages.prefix_cache import Node


@dataclass
class PageAllocation:
    """The pages of one request, as far as its page tables go by now.

    rings: for each group of layers, all pages of its ring, which the tables repeat; None: a table has a page for each entry.
    """

    table: list[int]  # by position; where there are two groups of layers, those of the layers that read all keys
    start: int = 0  # how many leading tokens of the prompt have their keys and values in the pages already
    node: Node | None = None  # the last page that it shares through the prefix cache; None without a prefix cache
    local: list[int] | None = None  # by position, for layers with a span, where there are two groups of layers
    encoder_page: int | None = None  # the page of the encoder's cache with the text that the request's encoder reads, if any
    rings: tuple[list[int] | None, ...] = (None,)
    most: int = 0  # entries that the tables can ever have
    borrowed: int = 0  # leading pages that the prefix cache has lent it
    number: int = 0  # how many requests got pages before

    @property
    def tables(self) -> tuple[list[int], ...]:
        """The page table of each group of layers."""
        return (self.table,) if self.local is None else (self.table, self.local)


class PrefixHit(NamedTuple):
    """What the prefix cache holds of a prompt: its leading pages in order, and the number of tokens in them.

    shared: the number of tokens in all kept pages that the prompt begins with, also where it can't begin after the last of
        them, if another text goes on differently there; else 0.
    """

    path: list[Node]
    tokens: int
    shared: int = 0


class Usage(NamedTuple):
    """Pages that requests own or read, states that are kept, and all there are; see Totals."""

    pages_used: int
    pages_total: int
    local_pages_used: int
    local_pages_total: int
    states_used: int
    states_total: int
