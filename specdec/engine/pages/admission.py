"""Decides which pages a request gets, and what happens to them after the request has ended.

A request borrows the leading pages of its prompt from the prefix cache, where the cache keeps them, and owns its other pages.
This module knows requests, pages and token ids; it knows no rows and no tensors.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import takewhile

from specdec.checks import PromptTooLong
from specdec.engine.pages.allocation import PageAllocation, PrefixHit, Usage
from specdec.engine.pages.copies import RingCopies
from specdec.engine.pages.forecast import OutputLengths, RowForecast, most_growth
from specdec.engine.pages.groups import RING_PREFILL
from specdec.engine.pages.kept_states import KeptStates, TextStates
from specdec.engine.pages.pool import PagePool
from specdec.engine.pages.prefix_cache import Node, PrefixCache, common_pages
from specdec.engine.request import Request, RequestState
from specdec.steps import CopyPages, EncoderInput

# A threshold in tokens: a prompt waits for another prompt's prefill if that saves the computation of at least so many tokens.
MIN_SHARED_TO_WAIT = 256


class Admission:
    """Gives pages to requests.

    pool: the pages of all layers; where there are two groups of layers, those of the layers that read all keys.
    lookahead: slots after the committed tokens that rounds in flight may write.
    lengths: how long outputs turned out to be.
    prefix_caching: whether pages are kept for later prompts; not possible if `pool` has a ring, nor with an encoder, because
        the decoder's keys and values depend on the encoder's text.
    local: the pages of the layers with a span, which have a ring; None where there is one group of layers.
    span: the most keys that one query reads in these layers.
    kept_states: numbers of states that are kept for later prompts, where a model has recurrent layers; None: none has.  A
        text of such models begins after kept pages only where a state is kept, too.
    drafts_have_states: whether the drafter has such layers.
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
        kept_states: range | None = None,
        drafts_have_states: bool = False,
    ) -> None:
        assert not (prefix_caching and pool.ring), "the pages of a ring are overwritten, so they can't be kept"
        assert not (prefix_caching and encoder_pages), "keys and values depend on the encoder's text, so they can't be kept"
        self._free_encoder_pages = list(range(encoder_pages))
        assert local is None or (local.ring is not None and local.ring <= local.capacity), "one ring at least"
        self.pool, self.local, self.lookahead = pool, local, lookahead
        self.copies = RingCopies(local, span, group=1) if local is not None and prefix_caching else None
        kept = KeptStates(kept_states) if kept_states is not None and prefix_caching else None
        drops = [None if each is None else each.drop for each in (self.copies, kept)]  # a state is the same without a drafter
        self.cache = PrefixCache(pool, *drops) if prefix_caching else None
        self.text_states = None if kept is None or self.cache is None else TextStates(kept, self.cache, drafts_have_states)
        self.allocations: dict[Request, PageAllocation] = {}
        self.lengths = OutputLengths()
        self._admitted = 0
        self._forecasts: list[RowForecast] | None = None  # of the requests that hold pages, sorted; None: some has changed
        self._looked_up: tuple[tuple[Request, int, bool, int], list[Node]] | None = None  # the last text, and what was found
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

    def usage(self) -> Usage:
        """How many pages and kept states are used now."""
        pages, local = self.pool.capacity, self.local.capacity if self.local else 0
        kept = self.text_states.kept if self.text_states else KeptStates(range(0))
        return Usage(
            pages - self.free_pages, pages, local - self.free_local_pages, local, kept.total - kept.num_free, kept.total
        )

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
        return request.most_read + self.lookahead

    def tokens_to_enter(self, request: Request) -> int:
        """The slots that the request occupies until its first round has run."""
        return min(request.text_length + self.lookahead, self.tokens_needed(request))

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
        """What the prefix cache holds of the request's text; None if there are certainly not enough pages for it.

        drafted: whether the request needs the drafter's keys and values too.
        """
        needed, size = self._tokens_to_take(request), self.pool.page_size
        if self.local is not None and self.local.pages_for(self.tokens_needed(request)) > self.free_local_pages:
            return None
        if self.cache is None:
            return PrefixHit([], 0) if self.pool.can_admit(needed) else None
        if self.pool.pages_for(needed) - request.text_length // size > self.free_pages:
            return None
        kept = self._look_up(self.cache, request, drafted)
        path = self._usable(kept)
        return PrefixHit(path, len(path) * size, len(kept) * size if kept and kept[-1].children else 0)

    def _look_up(self, cache: PrefixCache, request: Request, drafted: bool) -> list[Node]:
        """`PrefixCache.find`, which takes long for a long text; the one that waits is looked up before each launch."""
        if request.is_scored:
            return []
        asked = request, request.text_length, drafted, cache.changes
        if self._looked_up is None or self._looked_up[0] != asked:
            self._looked_up = asked, cache.find(request.text, drafted, request.cache_salt)
        return self._looked_up[1]

    def _usable(self, path: list[Node]) -> list[Node]:
        """The most leading pages of the path after which a text can begin."""
        length = None
        while length != len(path):
            length = len(path)
            if self.copies is not None:
                path = path[: self.copies.usable(path)]
            if self.text_states is not None:
                path = path[: self.text_states.kept.usable(path)]
        return path

    def foresees_room(self, request: Request, found: PrefixHit) -> bool:
        """Whether the pool will probably hold the request and all that hold pages now, until each has ended.

        found: what the cache holds of its text.  A request alone always has room (`check`).
        """
        if not self.allocations or self.pool.ring is not None:
            return True
        if self._forecasts is None:
            self._forecasts = sorted(
                self._forecast(other, len(held.table), len(held.table) - held.borrowed, held.number)
                for other, held in self.allocations.items()
            )
        growth = most_growth([*self._forecasts, self._forecast_entry(request, found, self._admitted)])
        own = self.pool.pages_for(self.tokens_to_enter(request)) - len(found.path)
        return own + growth <= self.free_pages - sum(not node.users for node in found.path)

    def _forecast(self, request: Request, entries: int, freed: int, number: int) -> RowForecast:
        """entries: of its page table.  freed: see RowForecast.  number: see OutputLengths.rest."""
        written, needed, entries_for = len(request.output.token_ids), self.tokens_needed(request), self.pool.table_pages
        now = min(request.num_tokens + self.lookahead, needed)
        end = min(now + self.lengths.rest(written, request.sampling.max_tokens - written, number), needed)
        rest = entries_for(end) - entries_for(now)
        return RowForecast(rest, min(rest, max(0, entries - entries_for(now))), freed)

    def _forecast_entry(self, request: Request, found: PrefixHit, number: int) -> RowForecast:
        entries = self.pool.table_pages(self.tokens_to_enter(request))
        return self._forecast(request, entries, entries - len(found.path), number)

    def should_wait(self, request: Request, found: PrefixHit, others: Sequence[RequestState]) -> bool:
        """Whether the request had better enter after the texts of `others` have run.

        That is so if the prefix cache would then hold at least min_shared_to_wait more tokens of its text.  With recurrent
        layers it must hold a state there, so the others are asked to keep theirs.
        found: what the cache holds now.
        """
        if self.cache is None or request.is_scored:
            return False
        text, size, waits = request.text, self.pool.page_size, False
        for other in others:
            if other.request.cache_salt != request.cache_salt:
                continue
            shared = common_pages(text, other.text, size) * size
            if shared - found.tokens >= self.min_shared_to_wait:
                kept = self.text_states
                waits |= kept is None or kept.will_keep(other.request, shared, other.done, request)
        return waits

    def admit(self, request: Request, found: PrefixHit) -> bool:
        """Gives the request the pages with which it enters.  Returns whether there were enough; if not, nothing has changed."""
        needed, entries = self._tokens_to_take(request), self.pool.table_pages(self.tokens_to_enter(request))
        have, node = len(found.path), None
        own = self.pool.pages_for(needed) - have
        if self.cache is not None:
            node = found.path[-1] if found.path else self.cache.root
            self.cache.use(node)
            if own > self.free_pages:
                self.cache.leave(node)
                return False
        local = self._local_ring(request, found)  # before a node is evicted, and its copy with it
        self.make_room(own)
        pages = [node.page for node in found.path] + self.pool.admit(request, needed, have)
        held = PageAllocation(_around(pages, entries), found.tokens, node, borrowed=have, number=self._admitted)
        held.most = self.pool.table_pages(self.tokens_needed(request))
        self._admitted, self._looked_up = self._admitted + 1, None
        held.rings = (None if self.pool.ring is None else pages,)
        if local is not None:
            held.local, held.rings = _around(local, entries), (*held.rings, local)
        if request.encoder_ids is not None:
            held.encoder_page = self._free_encoder_pages.pop()
        self.allocations[request] = held
        if self.text_states is not None:
            self.text_states.begin(request, found.path, request.text_length, found.shared, request.cache_salt)
        if self._forecasts is not None:
            insort(self._forecasts, self._forecast_entry(request, found, held.number))
        if self.cache is not None and not request.has_entered:
            self.lookup_tokens += len(request.prompt_ids)
            self.hit_tokens += found.tokens
            request.stats.cached_tokens = found.tokens
        return True

    def _tokens_to_take(self, request: Request) -> int:
        """For how many tokens the request gets pages of `pool` as it enters.  A ring is never given in parts."""
        return self.tokens_to_enter(request) if self.pool.ring is None else self.tokens_needed(request)

    def make_room(self, count: int) -> None:
        """Has at least so many pages free in the pool.  Kept ones go that were used least recently."""
        if self.cache is not None:
            self.cache.evict(max(0, count - self.pool.num_free))

    def _local_ring(self, request: Request, found: PrefixHit) -> list[int] | None:
        """Gives the request its ring, and orders the copies of what it has found; None where there is one group of layers."""
        if self.local is None:
            return None
        needed = self.tokens_needed(request)
        if self.copies is not None:
            # What is dropped here may be what is found: it is read before anybody writes to it.
            sources = self.copies.of(found.path)
            self.copies.make_room(self.local.pages_for(needed))
        ring = self.local.admit(request, needed)
        if self.copies is not None:
            first = len(found.path) - len(sources)
            self.copies.orders.add(sources, [ring[i % len(ring)] for i in range(first, len(found.path))])
        return ring

    def encoder_input(self, request: Request) -> EncoderInput | None:
        """What the target's encoder reads for an admitted request, and where it is kept; None without an encoder."""
        if request.encoder_ids is None:
            return None
        page = self.allocations[request].encoder_page
        assert page is not None
        return EncoderInput(page, request.encoder_ids)

    # ---- pages for more tokens ----

    def entries_lacking(self, request: Request, tokens: int) -> int:
        """How many entries the request's page tables lack for so many tokens.  It never needs more than `tokens_needed`."""
        held = self.allocations[request]
        return max(0, min(-(-tokens // self.pool.page_size), held.most) - len(held.table))

    def pages_lacking(self, request: Request, tokens: int) -> int:
        """How many pages these are of `pool`; a ring has all its pages."""
        return self.entries_lacking(request, tokens) if self.pool.ring is None else 0

    def grow(self, request: Request, tokens: int) -> Sequence[Sequence[int]]:
        """Gives the request pages for so many tokens, which are there.  Returns the new entries of each group's table."""
        held, count, lacking = (
            self.allocations[request],
            self.entries_lacking(request, tokens),
            self.pages_lacking(request, tokens),
        )
        first = len(held.table)
        self.make_room(lacking)
        lent, self._forecasts = self.pool.lend(request, lacking), None
        more = [lent if ring is None else [ring[i % len(ring)] for i in range(first, first + count)] for ring in held.rings]
        for table, pages in zip(held.tables, more, strict=True):
            table.extend(pages)
        return more

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

    def keep(self, request: Request, tokens: Sequence[int], drafted: bool, reach: int, leaves: bool = False) -> None:
        """Keeps the pages of these tokens for other requests.

        tokens: the leading tokens of the request; the keys and values of all but the last are written and final.
        drafted: whether the drafter's keys and values are written too.
        reach: no launch so far has written to this position of the request or to one after it.
        leaves: whether the request gives all its pages back now.
        """
        allocation = self.allocations[request]
        if self.cache is None or allocation.node is None:
            return
        salt = request.cache_salt
        allocation.node = self.cache.insert(request, allocation.node, tokens, allocation.table, drafted, leaves, salt)
        if self.copies is not None:
            assert allocation.local is not None
            first = self.copies.first_needed(allocation.start // self.pool.page_size)
            path = self.cache.find(tokens, False, salt)  # also pages of which the request has its own
            self.copies.keep(path, allocation.local, first, reach, drafted)

    def leave(self, request: Request) -> None:
        """Gives back all pages that the request owns or has borrowed.

        A round in flight may still write to the pages that the request owned.  That does no harm: whatever the next owner
        writes or reads there is launched after that round.
        """
        allocation, self._forecasts = self.allocations.pop(request), None
        if allocation.encoder_page is not None:
            self._free_encoder_pages.append(allocation.encoder_page)
        if self.text_states is not None:
            self.text_states.leave(request)
        if self.cache is not None and allocation.node is not None:
            self.cache.leave(allocation.node)
        self.pool.release(request)
        if self.local is not None:
            self.local.release(request)


def _around(pages: list[int], entries: int) -> list[int]:
    """A page table of so many entries, which repeats the pages if there are fewer: then they are a ring."""
    return [pages[i % len(pages)] for i in range(entries)]
