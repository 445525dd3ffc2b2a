"""The kernel of lookup.py: one program for each sequence, which narrows its scope's places down with many looks at once.

Shapes: B sequences, Q tokens that are compared, W places that are looked at, D tokens of a continuation, R places for them,
N tokens of a table, S scopes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.kernels.tables_triton import slots_of
from specdec.draft.ngram.lookup import MAX_MATCH, PagedTexts
from specdec.draft.ngram.paths_triton import IS_ONCE, kind_of_support
from specdec.draft.suffix.device_table import DeviceTable
from specdec.draft.suffix.host_table import MAX_SCOPES
from specdec.draft.suffix.lookup import CONTINUATIONS, VOTES, WINDOW
from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.draft.suffix.lookup import Continuations

LOOKS = 256  # places that a program looks at in one step of its search


@triton.jit
def own_token(page_table, text, length, first, back, PAGE_SIZE: tl.constexpr):
    """int32: the token so many before a text's last one; -2 where there is none."""
    position = length - 1 - back
    is_there = position >= first
    slot = slots_of(page_table, tl.maximum(position, 0), True, PAGE_SIZE)
    return tl.where(is_there, tl.load(text + slot, mask=is_there, other=-2), -2)


@triton.jit(
    do_not_specialize=["stride_row", "span", "capacity", "depth", "room", "stride_tokens", "stride_lengths", "steps"],
    do_not_specialize_on_alignment=["page_table", "lens"],
)
def continuations_kernel(
    page_table,  # [B, pages] int32
    lens,  # [B] int32
    text,  # [slots] int32: the rows' own texts
    keys,  # [B] int64
    table_text,  # [2, N] int32
    table_order,  # [2, N] int32
    table_keys,  # [2, S] int64
    table_bounds,  # [2, S, 2] int32
    table_half,  # [1] int32
    tokens,  # [B, M, R] int64
    lengths,  # [B, M] int64
    support,  # [B, M] int64
    stride_row,
    span,
    capacity,  # N
    depth,  # D
    room,  # R
    stride_tokens,  # of rows
    stride_lengths,
    steps,  # of the search
    SCOPES: tl.constexpr,  # S
    QUERY: tl.constexpr,  # Q
    LOOKS: tl.constexpr,
    WINDOW: tl.constexpr,  # W
    VOTES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # of R
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    half = tl.load(table_half)
    key = tl.load(keys + b)
    scope_S = half * SCOPES + tl.arange(0, SCOPES)
    is_own_S = (tl.load(table_keys + scope_S) == key) & (key != 0)
    first_rank = tl.sum(tl.load(table_bounds + 2 * scope_S, mask=is_own_S, other=0), 0)
    end_rank = tl.sum(tl.load(table_bounds + 2 * scope_S + 1, mask=is_own_S, other=0), 0)
    table_text += half.to(tl.int64) * capacity
    table_order += half.to(tl.int64) * capacity
    page_table += b * stride_row
    length = tl.load(lens + b)
    first = tl.maximum(length - span, 0)

    low, high = first_rank, end_rank
    look_K = tl.arange(0, LOOKS)
    for _ in range(steps):
        # The looks divide what is left evenly; the first of them that is not before the text's end is one of its ends.
        rank_K = low + ((look_K + 1).to(tl.int64) * (high - low) // (LOOKS + 1)).to(tl.int32)
        is_look_K = rank_K < high
        place_K = tl.load(table_order + rank_K, mask=is_look_K, other=0)
        before_K, alike_K = tl.zeros([LOOKS], tl.int1), is_look_K
        for back in tl.static_range(QUERY):
            last = own_token(page_table, text, length, first, back, PAGE_SIZE)
            at_K = place_K - 1 - back
            token_K = tl.load(table_text + at_K, mask=is_look_K & (at_K >= 0), other=-1)
            before_K = before_K | (alike_K & (token_K < last))
            alike_K = alike_K & (token_K == last)
        next_low = tl.max(tl.where(before_K, rank_K + 1, low), 0)
        high = tl.min(tl.where(is_look_K & (before_K == 0), rank_K, high), 0)
        low = tl.minimum(next_low, high)

    w_W = tl.arange(0, WINDOW)
    rank_W = low - WINDOW // 2 + w_W
    is_place_W = (rank_W >= first_rank) & (rank_W < end_rank)
    place_W = tl.load(table_order + rank_W, mask=is_place_W, other=0)
    length_W, alike_W = tl.zeros([WINDOW], tl.int32), is_place_W
    for back in tl.static_range(QUERY):
        last = own_token(page_table, text, length, first, back, PAGE_SIZE)
        at_W = place_W - 1 - back
        token_W = tl.load(table_text + at_W, mask=is_place_W & (at_W >= 0), other=-1)
        alike_W = alike_W & (token_W == last)
        length_W += alike_W.to(tl.int32)
    equal_WW = length_W[:, None] == length_W[None, :]
    equal_WW = equal_WW & is_place_W[:, None] & is_place_W[None, :]
    total_W = tl.sum(equal_WW.to(tl.int32), 1)
    goes_on_W, votes_W, agree_W = is_place_W, tl.zeros([WINDOW], tl.int32), tl.zeros([WINDOW], tl.int32)
    first_W = tl.zeros([WINDOW], tl.int32)
    for step in tl.static_range(VOTES):
        at_W = place_W + step
        token_W = tl.load(table_text + at_W, mask=goes_on_W & (at_W < capacity), other=-1)
        goes_on_W = goes_on_W & (token_W >= 0)
        if step == 0:
            first_W = token_W
        equal_WW = equal_WW & (token_W[:, None] == token_W[None, :])
        votes_W += tl.sum(equal_WW.to(tl.int32), 1)
        if step == 0:
            agree_W = votes_W
    rated_W = (length_W * (WINDOW * VOTES + 1) + votes_W) * WINDOW + (WINDOW - 1 - w_W)
    rated_W = tl.where(length_W > 0, rated_W, -1)
    support_W = kind_of_support(agree_W, total_W)

    d_D = tl.arange(0, BLOCK)
    for m in tl.static_range(2):
        best = tl.max(rated_W, 0)
        is_best_W = (rated_W == best) & (best >= 0)
        place = tl.sum(tl.where(is_best_W, place_W, 0), 0)
        token_D = tl.load(table_text + place + d_D, mask=(best >= 0) & (d_D < depth) & (place + d_D < capacity), other=-1)
        is_over_D = tl.cumsum((token_D < 0).to(tl.int32), 0) > 0
        tl.store(tokens + b * stride_tokens + m * room + d_D, tl.where(is_over_D, -1, token_D).to(tl.int64), mask=d_D < room)
        tl.store(lengths + b * stride_lengths + m, tl.sum(tl.where(is_best_W, length_W, 0), 0).to(tl.int64))
        kind = tl.where(best >= 0, tl.sum(tl.where(is_best_W, support_W, 0), 0), IS_ONCE)
        tl.store(support + b * stride_lengths + m, kind)
        chosen = tl.sum(tl.where(is_best_W, first_W, 0), 0)
        rated_W = tl.where(first_W == chosen, -1, rated_W)


def launch_continuations(
    table: DeviceTable, text: PagedTexts, keys_B: Tensor, depth: int, out: Continuations, looks: int = LOOKS
) -> None:  # fmt: skip
    """`lookup.find_continuations`.  looks: LOOKS, or fewer in tests."""
    pages, (tokens_BMR, lengths_BM, support_BM), device = text.pages, out, keys_B.device
    B, M, room = tokens_BMR.shape
    assert M == CONTINUATIONS == 2 and pages.table.stride(1) == 1 and keys_B.is_contiguous() and depth <= room
    assert tokens_BMR.stride()[1:] == (room, 1) and lengths_BM.stride(1) == 1 and support_BM.stride() == lengths_BM.stride()
    steps, left = 1, table.capacity
    while left > 0:  # each step leaves the places between two looks
        steps, left = steps + 1, left // (looks + 1)
    continuations_kernel[(B,)](
        pages.table, text.lens_B, text.tokens_N, keys_B, table.text_2N, table.order_2N, table.keys_2S, table.bounds_2S2,
        table.half_1, tokens_BMR, lengths_BM, support_BM, pages.table.stride(0),
        pages.capacity if text.span is None else text.span, table.capacity, depth, room, tokens_BMR.stride(0),
        lengths_BM.stride(0), steps,
        SCOPES=MAX_SCOPES, QUERY=MAX_MATCH, LOOKS=looks, WINDOW=WINDOW, VOTES=VOTES, PAGE_SIZE=pages.page_size,
        BLOCK=max(16, triton.next_power_of_2(room)), num_warps=4, **chained(device),
    )  # fmt: skip
