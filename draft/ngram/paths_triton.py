"""The kernel of source.py: one program for each sequence, which chooses two of its best places and copies how the text goes on.

Shapes: B sequences, X places that are given, M of which the best are looked at, P = 2 paths, D tokens of a path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.kernels.tables_triton import slots_of
from specdec.draft.join.survival import ALL, FEW, IN_STEP, MOST, ONCE
from specdec.draft.ngram.lookup import FAR, MAX_MATCH, SHIFT, PagedTexts
from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.draft.join.paths import Paths


IS_ONCE, IS_ALL, IS_MOST, IS_FEW = tl.constexpr(ONCE), tl.constexpr(ALL), tl.constexpr(MOST), tl.constexpr(FEW)
IS_IN_STEP = tl.constexpr(IN_STEP)


@triton.jit
def kind_of_support(agree, total):
    """int64: `survival.support_of`."""
    some = tl.where(2 * agree > total, IS_MOST, IS_FEW)
    return tl.where(agree < total, some, tl.where(total > 1, IS_ALL, IS_ONCE)).to(tl.int64)


@triton.jit
def path_position(end, step, last):
    """int64: where the text's entry stands that follows a place by so many steps; a text that ends goes on from the place.

    end: the place, -1 if there is none.
    """
    end = tl.where(end >= 0, end, last - 1)
    position = end + 1 + step % tl.maximum(last - end, 1)
    return tl.minimum(tl.maximum(position, 0), last)


@triton.jit
def ends_of(keys, at, BITS: tl.constexpr, MOST: tl.constexpr):
    """int64: the places of keys, see `lookup.matches_of`; -1 where there is none."""
    twice = MOST - (keys & ((tl.full([], 1, tl.int64) << BITS) - 1))
    apart = tl.where(twice % 2 > 0, (twice + 1) // 2, -(twice // 2))
    return tl.where(keys >= 0, at + apart, -1)


@triton.jit(
    do_not_specialize=["stride_row", "count", "span", "depth", "room", "stride_tokens", "stride_lengths"],
    do_not_specialize_on_alignment=["page_table", "lens", "back", "tokens", "lengths", "support"],
)
def match_paths_kernel(
    page_table,  # [B, pages] int32
    lens,  # [B] int32
    text,  # [slots] int32
    keys,  # [B, X] int64
    back,  # [B] int64
    tokens,  # [B, P, room] int64, with a stride between sequences
    lengths,  # [B, P] int64, likewise
    support,  # [B, P] int64, with the same one
    stride_row,
    count,  # X
    span,
    depth,  # D
    room,
    stride_tokens,
    stride_lengths,
    MATCHES: tl.constexpr,  # M
    GIVEN: tl.constexpr,  # X, padded
    LENGTH: tl.constexpr,  # MAX_MATCH
    SHORTEST: tl.constexpr,  # LEAST
    BITS: tl.constexpr,  # SHIFT
    MOST: tl.constexpr,  # FAR
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    b, m_M, x_X = tl.program_id(0).to(tl.int64), tl.arange(0, MATCHES), tl.arange(0, GIVEN)
    d_D = tl.arange(0, BLOCK)
    ok_D = d_D < depth
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    size, behind = tl.load(lens + b).to(tl.int64), tl.load(back + b)
    last, at = tl.maximum(size - 1, 0), size - 1 - behind
    first_place = tl.maximum(size - span, 0)
    page_table += b * stride_row
    given_X = tl.load(keys + b * count + x_X, mask=x_X < count, other=-1)
    key_M = tl.full([MATCHES], -1, tl.int64)
    for m in tl.static_range(MATCHES):
        best = tl.max(given_X, 0)
        given_X = tl.where(given_X == best, -1, given_X)
        key_M = tl.where(m_M == m, best, key_M)
    found_M, end_M = key_M >= 0, ends_of(key_M, at, BITS, MOST)
    length_M = tl.maximum(key_M >> BITS, 0)
    slot_M = slots_of(page_table, path_position(end_M, 0, last), found_M, PAGE_SIZE)
    first_M = tl.load(text + slot_M, mask=found_M, other=-1)
    alike_MM = (length_M[:, None] == length_M[None, :]) & found_M[:, None] & found_M[None, :]
    total_M = tl.sum(alike_MM.to(tl.int64), 1)
    agree_M = tl.sum((alike_MM & (first_M[:, None] == first_M[None, :])).to(tl.int64), 1)
    support_M = kind_of_support(agree_M, total_M)
    rated_M = tl.where(found_M, (length_M * (MATCHES + 1) + agree_M) * MATCHES + MATCHES - m_M, -1)
    tokens, lengths, support = tokens + b * stride_tokens, lengths + b * stride_lengths, support + b * stride_lengths
    follows = (behind > 0) & (at >= first_place)
    before = tl.full([], -1, tl.int64)
    for p in tl.static_range(2):
        best = tl.max(rated_M, 0)
        is_best_M = (rated_M == best) & (best >= 0)
        own = tl.max(tl.where(is_best_M, end_M, -1), 0)
        length = tl.sum(tl.where(is_best_M, length_M, 0), 0)
        kind = tl.where(best >= 0, tl.sum(tl.where(is_best_M, support_M, 0), 0), IS_ONCE)
        if p == 0:
            followed = tl.where((own >= 0) & (length >= SHORTEST), last - own, behind)
        else:
            takes_step = follows & (at != before)
            own = tl.where(takes_step, at, own)
            q_Q = tl.arange(0, LENGTH)
            here_Q, there_Q = at - q_Q, last - q_Q
            ok_Q = takes_step & (here_Q >= first_place)
            here_Q = tl.load(text + slots_of(page_table, here_Q, ok_Q, PAGE_SIZE), mask=ok_Q, other=-1)
            there_Q = tl.load(text + slots_of(page_table, there_Q, ok_Q, PAGE_SIZE), mask=ok_Q, other=-2)
            wrong_Q = (here_Q != there_Q).to(tl.int64)
            length = tl.where(takes_step, tl.sum((tl.cumsum(wrong_Q, 0) == 0).to(tl.int64), 0), length)
        kind = tl.where(follows & (own == at), IS_IN_STEP, kind)
        end = tl.where(own >= 0, own, before)  # without a place of its own it is the first path
        slot_D = slots_of(page_table, path_position(end, d_D, last), ok_D, PAGE_SIZE)
        token_D = tl.where(ok_D, tl.load(text + slot_D, mask=ok_D, other=0).to(tl.int64), -1)
        tl.store(tokens + p * room + d_D, token_D, mask=d_D < room)
        tl.store(lengths + p, length)
        tl.store(support + p, kind)
        rated_M = tl.where(first_M == tl.sum(tl.where(is_best_M, first_M, 0), 0), -1, rated_M)
        before = end
    tl.store(back + b, followed)


def launch_paths(
    text: PagedTexts, keys_BX: Tensor, matches: int, least: int, back_B: Tensor, depth: int, out: Paths
) -> None:  # fmt: skip
    """`source.paths_of`, from keys in any order.  matches: M, how many of the best are looked at.  least: LEAST there."""
    (B, X), pages, (tokens_BPD, lengths_BP, support_BP) = keys_BX.shape, text.pages, out[:3]
    room, given = tokens_BPD.shape[2], max(16, triton.next_power_of_2(X))
    assert tokens_BPD.shape[1] == 2 and pages.table.stride(1) == 1 and depth <= room and keys_BX.is_contiguous()
    assert tokens_BPD.stride()[1:] == (room, 1) and lengths_BP.stride(1) == 1 and support_BP.stride() == lengths_BP.stride()
    assert back_B.is_contiguous()
    match_paths_kernel[(B,)](
        pages.table, text.lens_B, text.tokens_N, keys_BX, back_B, tokens_BPD, lengths_BP, support_BP,
        pages.table.stride(0), X, pages.capacity if text.span is None else text.span, depth, room,
        tokens_BPD.stride(0), lengths_BP.stride(0),
        MATCHES=matches, GIVEN=given, LENGTH=MAX_MATCH, SHORTEST=least, BITS=SHIFT, MOST=FAR, PAGE_SIZE=pages.page_size,
        BLOCK=max(16, triton.next_power_of_2(room)),
        num_warps=1 if given <= 256 else 4, **chained(keys_BX.device),
    )  # fmt: skip
