"""Decides which layers share a page table: those that read all keys, and those that read a span of keys only.

A sequence has one page table for each group of layers.  Layers with a span hold their span in a ring of pages, while layers
that read all keys hold all of them.  A group has slots and page numbers of its own.  This module knows spans, counts and bytes;
it knows no layer and no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.engine.pages.pool import ring_pages

RING_PREFILL = 2048  # the most tokens of one prompt in one chunk, where sequences reuse a ring of pages
LOCAL_SHARE = 0.5  # where memory is too small, the most of it that rings get before the layers that read all keys get theirs


class KVCacheGroup(NamedTuple):
    """Layers that share one page table."""

    ring: int | None  # the number of pages that a sequence reuses for these layers; None: it has pages for all its tokens
    span: int | None  # the most keys that one query reads in any of these layers; None: there is no bound


ALL = KVCacheGroup(None, None)  # a group in which every sequence has pages for all its tokens


def page_groups(
    spans: Sequence[int | None], lookahead: int, page_size: int, table_pages: int, prefix_caching: bool
) -> tuple[KVCacheGroup, ...]:
    """One group, or two: the layers that read all keys, and then those with a span.

    spans: for each layer of both models, the most keys that one query reads; None for a layer that reads all keys.
    lookahead: slots after the committed tokens that rounds in flight may write.
    table_pages: entries in the table of the longest sequence; there is no ring as long as that.
    prefix_caching: whether pages are kept for later prompts.  A page of a ring can't be kept itself, so where every layer has a
        span nothing is left to keep, and all layers then have pages for all tokens.
    """
    bounded = [span for span in spans if span is not None]
    if not bounded or (prefix_caching and len(bounded) == len(spans)):
        return (ALL,)
    span = max(bounded)
    ring = ring_pages(span, max(lookahead, RING_PREFILL), page_size)
    ring += prefix_caching  # a chunk's first page may begin before the chunk; it is still there when the chunk has run
    if ring >= table_pages:
        return (ALL,)
    local = KVCacheGroup(ring, span)
    return (local,) if len(bounded) == len(spans) else (ALL, local)


def group_of(span: int | None, groups: Sequence[KVCacheGroup]) -> int:
    """The index of the group to which a layer with that span belongs."""
    return 1 if len(groups) == 2 and span is not None else 0


def share_memory(memory: float, wanted: Sequence[int], page_bytes: Sequence[int], needed: Sequence[int]) -> tuple[int, ...]:
    """How many pages each group gets, the dummy page included.

    memory: bytes for all pages.
    wanted: the pages with which each group serves everybody at once.
    page_bytes: the bytes of one page of each group.
    needed: the pages of each group without which the longest sequence can't run.

    If the memory is too small for all that is wanted, the second group gets at most LOCAL_SHARE of it, and leaves what the
    longest sequence needs in the first group, but it gets one ring in any case.  The first group gets the rest, and what
    the first group does not want goes back to the second.  So short sequences are not kept waiting by a lack of rings.
    The result may name fewer than two pages for the first group, or more bytes than there are; then the memory holds no KV
    pool at all.
    """
    if len(wanted) == 1:
        return (min(wanted[0], int(memory // page_bytes[0])),)
    if sum(pages * size for pages, size in zip(wanted, page_bytes, strict=True)) <= memory:
        return tuple(wanted)
    for_local = min(memory * LOCAL_SHARE, memory - needed[0] * page_bytes[0])
    local = max(needed[1], min(wanted[1], int(for_local // page_bytes[1])))
    full = min(wanted[0], int((memory - local * page_bytes[1]) // page_bytes[0]))
    local = max(local, min(wanted[1], int((memory - full * page_bytes[0]) // page_bytes[1])))
    return full, local
