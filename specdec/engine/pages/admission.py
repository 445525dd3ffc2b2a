"""Decides which pages a request gets, and what happens to them after the request has ended.

A request borrows the leading pages of its prompt from the prefix cache, where the cache keeps them, and owns its other pages.
This module knows requests, pages and token ids; it knows no rows and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from specdec.checks import PromptTooLong
from specdec.engine.pages.copies import RingCopies
from specdec.engine.pages.groups import RING_PREFILL
from specdec.engine.pages.pool import PagePool
from specdec.engine.pages.prefix_cache import Node, PrefixCache, common_pages
from specdec.engine.request import Request
from specdec.steps import CopyPages

# A threshold in tokens: a prompt waits for another prompt's prefill if that saves the computation of at least so many tokens.
MIN_SHARED_TO_WAIT = 256


@dataclass
class PageAllocation:
    """The pages of one request."""

    table: list[int]  # by position; where there are two groups of layers, those of the layers that read all keys
    start: int = 0  # how many leading tokens of the prompt have their keys and values in the pages already
    node: Node | None = None  # the last page that it shares through the prefix cache; None without a prefix cache
    local: list[int] | None = None  # by position, for layers with a span, where there are two groups of layers
    encoder_page: int | None = None  # the page of the encoder's cache with the text that the request's encoder reads, if any

    @property
    def tables(self) -> tuple[list[int], ...]:
        """The page table of each group of layers."""
        return (self.table,) if self.local is None else (self.table, self.local)


class PrefixHit(NamedTuple):
    """What the prefix cache holds of a prompt: its leading pages in order, and the number of tokens in them."""

    path: list[Node]
    tokens: int


class Admission:
    """Gives pages to requests.

    pool: the pages of all layers; where there are two groups of layers, those of the layers that read all keys.
    lookahead: slots after the committed tokens that rounds in flight may write.
    prefix_caching: whether pages are kept for later prompts; not possible if `pool` has a ring, nor with an encoder, because
        the decoder's keys and values depend on the encoder's text.
    local: the pages of the layers with a span, which have a ring; None where there is one group of layers.
    span: the most keys that one query reads in these layers.
    encoder_pages: pages of the encoder's cache, at least one for each row; 0: there is no encoder.
    lookup_tokens, hit_tokens: how many prompt tokens were looked up in the prefix cache, and how many of them were found.
    min_shared_to_wait: see `should_wait`.
    """

    def __init__(
        self,
        pool: PagePool,
        lookahead: int,
        prefix_caching: bool,
        local: PagePool | None = None,
        span: int = 1,
        encoder_pages: int = 0,
    ) -> None:
        assert not (prefix_caching and pool.ring), "the pages of a ring are overwritten, so they can't be kept"
        assert not (prefix_caching and encoder_pages), "keys and values depend on the encoder's text, so they can't be kept"
        self._free_encoder_pages = list(range(encoder_pages))
        assert local is None or (local.ring is not None and local.ring <= local.capacity), "one ring at least"
        self.pool, self.local, self.lookahead = pool, local, lookahead
        self.copies = RingCopies(local, span, group=1) if local is not None and prefix_caching else None
        on_change = [] if self.copies is None else [self.copies.drop]
        self.cache = PrefixCache(pool, *on_change) if prefix_caching else None
        self.allocations: dict[Request, PageAllocation] = {}
        self.lookup_tokens = self.hit_tokens = 0
        self.min_shared_to_wait = MIN_SHARED_TO_WAIT

    @property
    def max_chunk_tokens(self) -> int | None:
        """The most tokens of one prompt in one chunk; None: no bound."""
        return None if self.local is None and self.pool.ring is None else RING_PREFILL

    @property
    def free_pages(self) -> int:
        """Pages of `pool` that belong to no request."""
        return self.pool.num_free + (self.cache.num_idle if self.cache else 0)

    @property
    def free_local_pages(self) -> int:
        """Pages of `local` that belong to no request; 0 where there is one group of layers."""
        if self.local is None:
            return 0
        return self.local.num_free if self.copies is None else self.copies.num_free

    @property
    def due_copies(self) -> list[CopyPages]:
        """The copies of pages that must be made, in this order, before the next launch."""
        return [] if self.copies is None else self.copies.orders.steps

    def forget_copies(self) -> None:
        """Drops all copies of pages, those that are due too."""
        self.due_copies.clear()
        if self.copies is not None:
            self.copies.drop_all()

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

    def find(self, request: Request, drafted: bool) -> PrefixHit | None:
        """What the prefix cache holds of the prompt; None if there are certainly not enough pages for the request.

        drafted: whether the request needs the drafter's keys and values too.
        """
        needed, size = self.tokens_needed(request), self.pool.page_size
        if self.local is not None and self.local.pages_for(needed) > self.free_local_pages:
            return None
        if self.cache is None:
            return PrefixHit([], 0) if self.pool.can_admit(needed) else None
        if self.pool.pages_for(needed) - len(request.prompt_ids) // size > self.free_pages:
            return None
        path = self.cache.find(request.prompt_ids, drafted)
        if self.copies is not None:
            path = path[: self.copies.usable(path)]
        return PrefixHit(path, len(path) * size)

    def should_wait(self, request: Request, found: PrefixHit, others: Sequence[Request]) -> bool:
        """Whether the request had better enter after the prompts of `others` have run.

        That is so if the prefix cache would then hold at least min_shared_to_wait more tokens of its prompt.
        found: what the cache holds now.
        """
        if self.cache is None:
            return False
        size = self.pool.page_size
        shared = max(common_pages(request.prompt_ids, other.prompt_ids, size) for other in others) * size
        return shared - found.tokens >= self.min_shared_to_wait

    def admit(self, request: Request, found: PrefixHit) -> bool:
        """Gives the request its pages.  Returns whether there were enough; if not, nothing has changed."""
        needed = self.tokens_needed(request)
        if self.cache is None:
            table = _around(self.pool.admit(request, needed), self.pool.table_pages(needed))
            encoder_page = None if request.encoder_ids is None else self._free_encoder_pages.pop()
            self.allocations[request] = PageAllocation(
                table, local=self._local_table(request, found), encoder_page=encoder_page
            )
            return True
        node = found.path[-1] if found.path else self.cache.root
        self.cache.use(node)
        own = self.pool.pages_for(needed) - len(found.path)
        if own > self.free_pages:
            self.cache.leave(node)
            return False
        local = self._local_table(request, found)  # before a node is evicted, and its copy with it
        self.cache.evict(max(0, own - self.pool.num_free))
        table = [node.page for node in found.path] + self.pool.admit(request, needed, have=len(found.path))
        self.allocations[request] = PageAllocation(table, found.tokens, node, local)
        self.lookup_tokens += len(request.prompt_ids)
        self.hit_tokens += found.tokens
        request.stats.cached_tokens = found.tokens
        return True

    def _local_table(self, request: Request, found: PrefixHit) -> list[int] | None:
        """Gives the request its ring, and orders the copies of what it has found; None where there is one group of layers."""
        if self.local is None:
            return None
        needed = self.tokens_needed(request)
        if self.copies is not None:
            # What is dropped here may be what is found: it is read before anybody writes to it.
            sources = self.copies.of(found.path)
            self.copies.make_room(self.local.pages_for(needed))
        table = _around(self.local.admit(request, needed), self.local.table_pages(needed))
        if self.copies is not None:
            self.copies.orders.add(sources, table[len(found.path) - len(sources) : len(found.path)])
        return table

    def fixed_pages(self, request: Request, drafted: bool) -> list[int]:
        """The request's leading pages, those of its prompt, to which nobody writes any more.

        drafted: only pages of the prefix cache that hold the drafter's keys and values too.
        """
        allocation = self.allocations[request]
        pages = allocation.table[: (len(request.prompt_ids) - 1) // self.pool.page_size]
        if not drafted:
            return pages
        path = [] if self.cache is None or allocation.node is None else self.cache.path(allocation.node)
        kept = (node.drafted and node.page == page for node, page in zip(path, pages, strict=False))
        return pages[: sum(takewhile(bool, kept))]

    def keep(self, request: Request, tokens: Sequence[int], drafted: bool, reach: int) -> None:
        """Keeps the pages of these tokens for other requests.

        tokens: the leading tokens of the request; the keys and values of all but the last are written and final.
        drafted: whether the drafter's keys and values are written too.
        reach: no launch so far has written to this position of the request or to one after it.
        """
        allocation = self.allocations[request]
        if self.cache is None or allocation.node is None:
            return
        allocation.node = self.cache.insert(request, allocation.node, tokens, allocation.table, drafted)
        if self.copies is not None:
            assert allocation.local is not None
            first = self.copies.first_needed(allocation.start // self.pool.page_size)
            self.copies.keep(self.cache.path(allocation.node), allocation.local, first, reach, drafted)

    def leave(self, request: Request) -> None:
        """Gives back all pages that the request owns or has borrowed.

        A round in flight may still write to the pages that the request owned.  That does no harm: whatever the next owner
        writes or reads there is launched after that round.
        """
        allocation = self.allocations.pop(request)
        if allocation.encoder_page is not None:
            self._free_encoder_pages.append(allocation.encoder_page)
        if self.cache is not None and allocation.node is not None:
            self.cache.leave(allocation.node)
        self.pool.release(request)
        if self.local is not None:
            self.local.release(request)


def _around(pages: list[int], entries: int) -> list[int]:
    """A page table of so many entries, which repeats the pages if there are fewer: then they are a ring."""
    return [pages[i % len(pages)] for i in range(entries)]
