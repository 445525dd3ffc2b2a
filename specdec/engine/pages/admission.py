"""Decides which pages a request gets, and what happens to them after the request has ended.

A request borrows the leading pages of its prompt from the prefix cache, where the cache keeps them, and owns its other pages.
This module knows requests, pages and token ids; it knows no rows and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from specdec.checks import PromptTooLong
from specdec.engine.pages.pool import PagePool, ring_pages
from specdec.engine.pages.prefix_cache import Node, PrefixCache, common_pages
from specdec.engine.request import Request

# A threshold in tokens: a prompt waits for another prompt's prefill if that saves the computation of at least so many tokens.
LEAST_SHARED_TO_WAIT = 256
RING_PREFILL = 2048  # the most tokens of one prompt in one chunk, where sequences reuse a ring of pages


def ring_of(spans: Iterable[int | None], lookahead: int, page_size: int, table_pages: int) -> int | None:
    """The number of pages in the ring that a sequence reuses; None: each entry of the sequence's table gets a page of its own.

    spans: for each layer of both models, the most keys that one query reads; None for a layer that reads all keys.
    lookahead: slots after the committed tokens that rounds in flight may write.
    page_size: tokens per page.
    table_pages: entries in the table of the longest sequence.
    """
    listed = list(spans)
    bounded = [span for span in listed if span is not None]
    if len(bounded) < len(listed):
        return None
    ring = ring_pages(max(bounded), max(lookahead, RING_PREFILL), page_size)
    return ring if ring < table_pages else None


@dataclass
class Place:
    """The pages of one request.

    table: its page numbers, by position.
    start: how many leading tokens of the prompt have their keys and values in the pages already.
    node: the last page that it shares through the prefix cache; None without a prefix cache.
    source: the page of the encoder's cache that holds the text which the request's encoder reads; None: it reads none.
    """

    table: list[int]
    start: int = 0
    node: Node | None = None
    source: int | None = None


class Found(NamedTuple):
    """What the prefix cache holds of a prompt: its leading pages in order, and the number of tokens in them."""

    path: list[Node]
    tokens: int


class Admission:
    """Gives pages to requests.

    lookahead: slots after the committed tokens that rounds in flight may write.
    prefix_caching: whether pages are kept for later prompts; not possible with a ring of pages, nor with an encoder, because
        the decoder's keys and values depend on the encoder's text.
    sources: pages of the encoder's cache, at least one for each row; 0: there is no encoder.
    lookup_tokens, hit_tokens: how many prompt tokens were looked up in the prefix cache, and how many of them were found.
    """

    def __init__(self, pool: PagePool, lookahead: int, prefix_caching: bool, sources: int = 0) -> None:
        assert not (prefix_caching and pool.ring), "the pages of a ring are overwritten, so they can't be kept"
        assert not (prefix_caching and sources), "keys and values depend on the encoder's text, so they can't be kept"
        self._free_sources = list(range(sources))
        self.pool, self.lookahead = pool, lookahead
        self.cache = PrefixCache(pool) if prefix_caching else None
        self.places: dict[Request, Place] = {}
        self.lookup_tokens = self.hit_tokens = 0

    @property
    def max_chunk_tokens(self) -> int | None:
        """The most tokens of one prompt in one chunk; None: no bound."""
        return None if self.pool.ring is None else RING_PREFILL

    @property
    def free_pages(self) -> int:
        """Pages that belong to no request."""
        return self.pool.num_free + (self.cache.num_idle if self.cache else 0)

    def longest_text(self, most: int) -> int:
        """The most tokens of prompt and output together that the whole pool holds, if these are not more than `most`."""
        if self.pool.pages_for(most + self.lookahead) <= self.pool.capacity:  # also where sequences reuse a ring
            return most
        return self.pool.capacity * self.pool.page_size - self.lookahead

    def tokens_needed(self, request: Request) -> int:
        """The most slots that the request can ever occupy, look-ahead included."""
        return len(request.prompt_ids) + request.sampling.max_tokens + self.lookahead

    def check(self, request: Request) -> None:
        """PromptTooLong if the pool could never hold the request."""
        pages = self.pool.pages_for(self.tokens_needed(request))
        if pages > self.pool.capacity:
            most = self.pool.capacity * self.pool.page_size - self.lookahead - len(request.prompt_ids)
            raise PromptTooLong(
                f"prompt ({len(request.prompt_ids)} tokens) + max_tokens + look-ahead ({self.lookahead}) must fit the KV pool "
                f"of {self.pool.capacity * self.pool.page_size} tokens, got max_tokens={request.sampling.max_tokens}; nearest "
                + (f"setting that works: max_tokens={most}" if most > 0 else "thing that works: a shorter prompt")
            )

    def find(self, request: Request, drafted: bool) -> Found | None:
        """What the prefix cache holds of the prompt; None if there are certainly not enough pages for the request.

        drafted: whether the request needs the drafter's keys and values too.
        """
        needed, size = self.tokens_needed(request), self.pool.page_size
        if self.cache is None:
            return Found([], 0) if self.pool.can_admit(needed) else None
        if self.pool.pages_for(needed) - len(request.prompt_ids) // size > self.free_pages:
            return None
        path = self.cache.find(request.prompt_ids, drafted)
        return Found(path, len(path) * size)

    def should_wait(self, request: Request, found: Found, others: Sequence[Request]) -> bool:
        """Whether the request had better enter after the prompts of `others` have run.

        That is so if the prefix cache would then hold at least LEAST_SHARED_TO_WAIT more tokens of its prompt.
        found: what the cache holds now.
        """
        if self.cache is None:
            return False
        size = self.pool.page_size
        shared = max(common_pages(request.prompt_ids, other.prompt_ids, size) for other in others) * size
        return shared - found.tokens >= LEAST_SHARED_TO_WAIT

    def admit(self, request: Request, found: Found) -> bool:
        """Gives the request its pages.  Returns whether there were enough; if not, nothing has changed."""
        needed = self.tokens_needed(request)
        if self.cache is None:
            pages = self.pool.admit(request, needed)
            source = None if request.source_ids is None else self._free_sources.pop()
            self.places[request] = Place([pages[i % len(pages)] for i in range(self.pool.table_pages(needed))], source=source)
            return True
        node = found.path[-1] if found.path else self.cache.root
        self.cache.use(node)
        own = self.pool.pages_for(needed) - len(found.path)
        if own > self.free_pages:
            self.cache.leave(node)
            return False
        self.cache.evict(max(0, own - self.pool.num_free))
        table = [node.page for node in found.path] + self.pool.admit(request, needed, have=len(found.path))
        self.places[request] = Place(table, found.tokens, node)
        self.lookup_tokens += len(request.prompt_ids)
        self.hit_tokens += found.tokens
        request.stats.cached_tokens = found.tokens
        return True

    def fixed_pages(self, request: Request, drafted: bool) -> list[int]:
        """The request's leading pages, those of its prompt, to which nobody writes any more.

        drafted: only pages of the prefix cache that hold the drafter's keys and values too.
        """
        place = self.places[request]
        pages = place.table[: (len(request.prompt_ids) - 1) // self.pool.page_size]
        if not drafted:
            return pages
        path = [] if self.cache is None or place.node is None else self.cache.path(place.node)
        kept = (node.drafted and node.page == page for node, page in zip(path, pages, strict=False))
        return pages[: sum(takewhile(bool, kept))]

    def keep(self, request: Request, tokens: Sequence[int], drafted: bool) -> None:
        """Keeps the pages of these tokens for other requests.

        tokens: the leading tokens of the request; the keys and values of all but the last are written and final.
        drafted: whether the drafter's keys and values are written too.
        """
        place = self.places[request]
        if self.cache is not None and place.node is not None:
            place.node = self.cache.insert(request, place.node, tokens, place.table, drafted)

    def leave(self, request: Request) -> None:
        """Gives back all pages that the request owns or has borrowed.

        A round in flight may still write to the pages that the request owned.  That does no harm: whatever the next owner
        writes or reads there is launched after that round.
        """
        place = self.places.pop(request)
        if place.source is not None:
            self._free_sources.append(place.source)
        if self.cache is not None and place.node is not None:
            self.cache.leave(place.node)
        self.pool.release(request)
