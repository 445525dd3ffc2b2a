"""The kernels of places.py: a program for each row, which walks over the row's prediction; and one that follows the answer.

Shapes: B rows, X tokens of the longest prediction, M = MAX_MATCH, D tokens of a path, E tokens of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from specdec.draft.ngram.lookup import FAR, MAX_MATCH, SHIFT
from specdec.draft.ngram.lookup_triton import nearness
from specdec.draft.ngram.paths_triton import IS_IN_STEP, IS_ONCE
from specdec.draft.prediction.places import LEAST
from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.draft.join.paths import Paths
    from specdec.draft.prediction.source import PredictionRows

BLOCK = 1024  # places that are compared at once


@triton.jit
def place_keys_of(place, ids, recent, at, size, LENGTH: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr):
    """int64: `places.place_keys` of some places."""
    equal, length = place < size, tl.zeros_like(place)
    for back in tl.static_range(1, LENGTH + 1):
        last = tl.load(recent + LENGTH - back)
        before = place - back
        token = tl.load(ids + before, mask=equal & (before >= 0), other=-1).to(tl.int64)
        equal = equal & (token == last)
        length += equal.to(tl.int64)
    return tl.where(place < size, (length << BITS) | nearness(place - at, MOST), -1)


@triton.jit
def write_path(tokens, lengths, support, ids, key, place, here, size, depth, room, BITS: tl.constexpr, WIDTH: tl.constexpr):
    d_D = tl.arange(0, WIDTH)
    is_there_D = (d_D < depth) & (place + d_D < size) & (key >= 0)
    token_D = tl.load(ids + place + d_D, mask=is_there_D, other=-1).to(tl.int64)
    tl.store(tokens + d_D, token_D, mask=d_D < room)
    tl.store(lengths, tl.maximum(key >> BITS, 0))
    tl.store(support, tl.where((place == here) & (key >= 0), IS_IN_STEP, IS_ONCE).to(tl.int64))


@triton.jit(
    do_not_specialize=["stride_ids", "depth", "room", "stride_tokens", "stride_lengths"],
    do_not_specialize_on_alignment=["tokens", "lengths", "support"],
)
def predicted_paths_kernel(
    ids,  # [B, X] int32
    sizes,  # [B] int64
    recent,  # [B, M] int64
    at,  # [B] int64
    found,  # [B] int64
    tokens,  # [B, 2, room] int64, with a stride between rows
    lengths,  # [B, 2] int64, likewise
    support,  # [B, 2] int64, with the same one
    stride_ids,
    depth,  # D
    room,
    stride_tokens,
    stride_lengths,
    LENGTH: tl.constexpr,  # M
    BITS: tl.constexpr,  # SHIFT
    MOST: tl.constexpr,  # FAR
    SHORTEST: tl.constexpr,  # LEAST
    SIZE: tl.constexpr,  # BLOCK
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    ids += b * stride_ids
    recent += b * LENGTH
    tokens += b * stride_tokens
    lengths += b * stride_lengths
    support += b * stride_lengths
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    size, here = tl.load(sizes + b), tl.load(at + b)
    best, second = tl.full([], -1, tl.int64), tl.full([], -1, tl.int64)
    first_place, second_place = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for begin in range(0, size, SIZE):
        place = begin + tl.arange(0, SIZE).to(tl.int64)
        key = place_keys_of(place, ids, recent, here, size, LENGTH, BITS, MOST)
        for _ in tl.static_range(2):
            top = tl.max(key, 0)
            its = tl.max(tl.where(key == top, place, -1), 0)
            key = tl.where(place == its, -1, key)
            is_best = top > best
            is_second = top > second
            second_place = tl.where(is_best, first_place, tl.where(is_second, its, second_place))
            second = tl.where(is_best, best, tl.where(is_second, top, second))
            first_place, best = tl.where(is_best, its, first_place), tl.where(is_best, top, best)
    if (here != first_place) & (here < size):
        own = here + tl.zeros([1], tl.int64)
        second = tl.max(place_keys_of(own, ids, recent, here, size, LENGTH, BITS, MOST), 0)
        second_place = here
    tl.store(found + b, tl.where((best >> BITS) >= SHORTEST, first_place, here))
    write_path(tokens, lengths, support, ids, best, first_place, here, size, depth, room, BITS, WIDTH)
    write_path(tokens + room, lengths + 1, support + 1, ids, second, second_place, here, size, depth, room, BITS, WIDTH)


@triton.jit(do_not_specialize=["emitted", "stride_tokens"])
def follow_kernel(
    recent,  # [B, M] int64
    at,  # [B] int64
    found,  # [B] int64
    tokens,  # [B, E] int64
    counts,  # [B] int64
    emitted,  # E
    stride_tokens,
    LENGTH: tl.constexpr,  # M
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(counts + b)
    m_M = count + tl.arange(0, LENGTH)
    old_M = tl.load(recent + b * LENGTH + m_M, mask=m_M < LENGTH, other=0)
    new_M = tl.load(tokens + b * stride_tokens + m_M - LENGTH, mask=(m_M >= LENGTH) & (m_M < LENGTH + emitted), other=0)
    here = tl.where(count > 0, tl.load(found + b) + count, tl.load(at + b))
    tl.debug_barrier()  # all are read before any is written
    tl.store(recent + b * LENGTH + tl.arange(0, LENGTH), tl.where(m_M < LENGTH, old_M, new_M))
    tl.store(at + b, here)


def launch_paths(rows: PredictionRows, depth: int, out: Paths) -> None:
    """`places.fill_paths`."""
    (tokens_BPD, lengths_BP, support_BP), B = out[:3], rows.at_R.shape[0]
    room = tokens_BPD.shape[2]
    assert tokens_BPD.stride()[1:] == (room, 1) and lengths_BP.stride(1) == 1 and depth <= room
    assert support_BP.stride() == lengths_BP.stride()
    predicted_paths_kernel[(B,)](
        *rows.tensors(), tokens_BPD, lengths_BP, support_BP,
        rows.ids_RX.stride(0), depth, room, tokens_BPD.stride(0), lengths_BP.stride(0),
        LENGTH=MAX_MATCH, BITS=SHIFT, MOST=FAR, SHORTEST=LEAST, SIZE=BLOCK, WIDTH=max(16, triton.next_power_of_2(room)),
        num_warps=8, **chained(tokens_BPD.device),
    )  # fmt: skip


def launch_follow(rows: PredictionRows, tokens_BE: Tensor, counts_B: Tensor) -> None:
    """`places.follow`."""
    B, E = tokens_BE.shape
    assert tokens_BE.stride(1) == 1 and counts_B.is_contiguous() and rows.recent_RM.is_contiguous()
    follow_kernel[(B,)](
        rows.recent_RM, rows.at_R, rows.found_R, tokens_BE, counts_B, E, tokens_BE.stride(0),
        LENGTH=MAX_MATCH, num_warps=1, **chained(tokens_BE.device),
    )  # fmt: skip
