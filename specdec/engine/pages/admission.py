"""Which pages a request gets, and what becomes of them behind it.  Knows requests, pages and texts; no rows and no tensors.

A request borrows the pages that its prompt begins with, where the prefix cache keeps them, and owns the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.engine.pages.pool import PagePool, ring_pages
from specdec.engine.pages.prefix_cache import Node, PrefixCache, common_pages
from specdec.engine.request import Request

WORTH_A_PASS = 256  # tokens two waiting prompts share from which the second waits for the first one's prefill
RING_PREFILL = 2048  # tokens of a prompt that pass through both models at once, where sequences go around a ring of pages


def ring_of(spans: Iterable[int | None], lookahead: int, page_size: int, table_pages: int) -> int | None:
    """Pages that a sequence goes around; None: it gets one for each entry of its table, of which it has table_pages.

    spans: the most keys that a query reads, of each layer of both models; None: a layer that reads all.
    """
    listed = list(spans)
    bounded = [span for span in listed if span is not None]
    if len(bounded) < len(listed):
        return None
    ring = ring_pages(max(bounded), max(lookahead, RING_PREFILL), page_size)
    return ring if ring < table_pages else None


@dataclass
class Place:
    """Where a request lives.  table: its pages by position.  start: leading prompt tokens whose KV is there already.

    node: the last page it shares through the prefix cache.
    """

    table: list[int]
    start: int = 0
    node: Node | None = None


class Found(NamedTuple):
    """What the prefix cache holds of a prompt: its leading pages, and their tokens."""

    path: list[Node]
    tokens: int


class Admission:
    """Pages for requests.  lookahead: slots behind the committed tokens that rounds in flight may write.

    lookup_tokens, hit_tokens: prompt tokens that were looked for in the prefix cache, and those found.
    """

    def __init__(self, pool: PagePool, lookahead: int, prefix_caching: bool) -> None:
        assert not (prefix_caching and pool.ring), "what a ring overwrites can't be kept"
        self.pool, self.lookahead = pool, lookahead
        self.cache = PrefixCache(pool) if prefix_caching else None
        self.places: dict[Request, Place] = {}
        self.lookup_tokens = self.hit_tokens = 0

    @property
    def max_chunk_tokens(self) -> int | None:
        """The most tokens of one prompt in one pass; None: no bound."""
        return None if self.pool.ring is None else RING_PREFILL

    @property
    def free_pages(self) -> int:
        """Pages that belong to no request."""
        return self.pool.num_free + (self.cache.num_idle if self.cache else 0)

    def tokens_needed(self, request: Request) -> int:
        """The most slots the request can come to occupy, look-ahead included."""
        return len(request.prompt_ids) + request.sampling.max_tokens + self.lookahead

    def check(self, request: Request) -> None:
        """ValueError if the pool could never hold the request."""
        pages = self.pool.pages_for(self.tokens_needed(request))
        if pages > self.pool.capacity:
            most = self.pool.capacity * self.pool.page_size - self.lookahead - len(request.prompt_ids)
            raise ValueError(
                f"prompt ({len(request.prompt_ids)} tokens) + max_tokens + look-ahead ({self.lookahead}) must fit the KV pool "
                f"of {self.pool.capacity * self.pool.page_size} tokens, got max_tokens={request.sampling.max_tokens}; nearest "
                + (f"setting that works: max_tokens={most}" if most > 0 else "thing that works: a shorter prompt")
            )

    def find(self, request: Request, drafted: bool) -> Found | None:
        """What the prefix cache holds of the prompt; None if there are not enough pages anyway.

        drafted: the draft's KV is needed too.
        """
        needed, size = self.tokens_needed(request), self.pool.page_size
        if self.cache is None:
            return Found([], 0) if self.pool.can_admit(needed) else None
        if self.pool.pages_for(needed) - len(request.prompt_ids) // size > self.free_pages:
            return None
        path = self.cache.find(request.prompt_ids, drafted)
        return Found(path, len(path) * size)

    def should_wait(self, request: Request, found: Found, others: Sequence[Request]) -> bool:
        """Whether the request had better enter behind those that enter now: it would find more of its prompt then."""
        if self.cache is None:
            return False
        size = self.pool.page_size
        shared = max(common_pages(request.prompt_ids, other.prompt_ids, size) for other in others) * size
        return shared - found.tokens >= WORTH_A_PASS

    def admit(self, request: Request, found: Found) -> bool:
        """Gives the request its pages, if there are enough."""
        needed = self.tokens_needed(request)
        if self.cache is None:
            pages = self.pool.admit(request, needed)
            self.places[request] = Place([pages[i % len(pages)] for i in range(self.pool.table_pages(needed))])
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

    def fixed_pages(self, request: Request) -> list[int]:
        """The leading pages that nobody writes to any more."""
        return self.places[request].table[: (len(request.prompt_ids) - 1) // self.pool.page_size]

    def keep(self, request: Request, tokens: Sequence[int], drafted: bool) -> None:
        """The KV of these tokens of the request but the last is written, and final: what others can use is kept for them."""
        place = self.places[request]
        if self.cache is not None and place.node is not None:
            place.node = self.cache.insert(request, place.node, tokens, place.table, drafted)

    def leave(self, request: Request) -> None:
        """Gives back all that the request owns and borrowed.  A round in flight may still write to pages it owned; whoever
        gets them next is launched behind it."""
        place = self.places.pop(request)
        if self.cache is not None and place.node is not None:
            self.cache.leave(place.node)
        self.pool.release(request)
