"""The kernels of cutoff.py: a search for the cutoff without sorting, by 15 edges (FlashInfer's pivots) at a time.

A logit's bits become a key, an integer in the order of the logits.  A level of the search cuts the range in which the cutoff's
key lies into 16 by 15 edges, and adds up what lies at or above each edge: the number of tokens for top-k, their weights for
top-p.  From these sums each program of the next level finds the new range.  On a search's first level the edges of a range of
more than _WIDE keys are equally far apart as logits, from _DEPTH below the row's best logit on, because less likely tokens have
no weight.  All other edges divide the range's keys equally.  Top-k comes first, since top-p is a share of what it keeps; a row
that has only one of them is done after half of the levels, and a range of one key needs none.  Blocks in which no token reaches
an edge are skipped.  All sums are of integers, so no order changes them.

Shapes: R rows, S slices of a row, L levels of one search, N tokens of a block; E = 16, the 15 edges and one just above top-k's
cutoff, whose sum tells how much the tokens weigh of which top-p keeps a share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.noise.cutoff import WEIGHT_OF_BEST, Cutoff
from specdec.ops.noise.filters import Filters

SLICE, BLOCK, SCAN = 4096, 512, 8192  # tokens of a program, of a step of it, and of a step of the last kernel
EDGES, FIELDS = 16, 8  # and numbers that a level's state may have
_WIDE, _DEPTH = tl.constexpr(4096), tl.constexpr(28.0)  # keys of a wide range; logits below the best that have a weight
# Triton would compare all numbers first, and keep more predicates than there are registers for.
_ADD_16 = tl.constexpr("{ .reg .pred p; setp.ge.s32 p, $3, $4; @p add.s64 $0, $1, $2; @!p mov.b64 $0, $1; }")
_ADD_32 = tl.constexpr("{ .reg .pred p; setp.ge.s64 p, $3, $4; @p add.s64 $0, $1, $2; @!p mov.b64 $0, $1; }")


@triton.jit
def _keys(x_N, BITS: tl.constexpr):
    """Integers in the order of the logits; -0 and 0 have the same."""
    if BITS == 16:
        bits_N = x_N.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        half = 1 << 15
    else:
        bits_N = x_N.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        half = 1 << 31
    bits_N = tl.where(x_N.to(tl.float32) == 0.0, 0, bits_N)
    return tl.where(bits_N < half, bits_N + half, 2 * half - 1 - bits_N)


@triton.jit
def _number(key, dtype: tl.constexpr, BITS: tl.constexpr):
    """float32: the number of that key."""
    half = 1 << 15 if BITS == 16 else 1 << 31
    bits = tl.where(key >= half, key - half, 2 * half - 1 - key)
    if BITS == 16:
        return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, safe_temperature, top, WEIGHT_OF_BEST: tl.constexpr):
    """int64: what a number counts for in top-p.  top: the largest of the row, after temperature."""
    below = tl.div_rn(x, tl.zeros_like(x) + safe_temperature) - top
    return tl.where(below <= 0.0, tl.exp(below) * WEIGHT_OF_BEST, 0.0).to(tl.int64)


@triton.jit
def _added(sum_EN, weight_N, key_N, edge_E, BITS: tl.constexpr, ASM: tl.constexpr):
    """The sums at edges, with the weights of tokens that lie at or above each edge."""
    if not ASM:
        return sum_EN + tl.where(key_N[None, :] >= edge_E[:, None], weight_N[None, :], 0)
    shape: tl.constexpr = sum_EN.shape
    weight_EN = tl.broadcast_to(weight_N[None, :], shape)
    key_EN, edge_EN = tl.broadcast_to(key_N[None, :], shape), tl.broadcast_to(edge_E.to(key_N.dtype)[:, None], shape)
    return tl.inline_asm_elementwise(
        _ADD_16 if BITS == 16 else _ADD_32, "=l,l,l,r,r" if BITS == 16 else "=l,l,l,l,l",
        [sum_EN, weight_EN, key_EN, edge_EN], dtype=tl.int64, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _options(temperatures, top_k, top_p, b, stride_floats, stride_ints, width):
    """(what a row's logits are divided by, top-k's number, top-p's share, whether the row has the one and the other)."""
    temperature = tl.load(temperatures + b * stride_floats)
    k = tl.load(top_k + b * stride_ints)
    p = tl.load(top_p + b * stride_floats)
    is_sampled = temperature > 0.0
    return tl.where(is_sampled, temperature, 1.0), k, p, is_sampled & (k > 0) & (k < width), is_sampled & (p < 1.0)


@triton.jit
def _largest(tops, row, slices, SLICES: tl.constexpr):
    s = tl.arange(0, SLICES)
    return tl.max(tl.load(tops + row * slices + s, mask=s < slices, other=-float("inf")), 0)


@triton.jit
def _adds_weights(level, has_k, has_p, LEVELS: tl.constexpr):
    """Whether a level searches top-p's cutoff: in a row with top-k the second search does, else the first."""
    return has_p & ((level >= LEVELS) == has_k)


@triton.jit
def _edges(low, count, within, top, safe_temperature, dtype: tl.constexpr, BITS: tl.constexpr, EDGES: tl.constexpr):
    """int64: the edges of a range of `count` keys from `low` on, all of them in it or just after it."""
    e_E = tl.arange(0, EDGES)
    edge_E = low + (e_E + 1).to(tl.int64) * ((count + EDGES - 1) // EDGES)
    if (within == 0) & (count > _WIDE):
        logit_E = (top - _DEPTH + (e_E + 1).to(tl.float32) * (_DEPTH / EDGES)) * safe_temperature
        edge_E = _keys(logit_E.to(dtype), BITS).to(tl.int64)
    return tl.minimum(tl.maximum(edge_E, low + 1), low + count)


@triton.jit
def _wanted(p, total):
    """What top-p wants, in float64; at least the smallest weight, so that the best token stays however small the share is."""
    return tl.maximum(p.to(tl.float64) * total.to(tl.float64), 1.0)


@triton.jit
def _state(
    states, sums_at_edges, row, level, k, p, has_k, has_p, safe_temperature, largest,
    dtype: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, EDGES: tl.constexpr, FIELDS: tl.constexpr,
    WEIGHT_OF_BEST: tl.constexpr,
):  # fmt: skip
    """What is known before a level, from the state before the last one and what that one added up:

    (the first key of the range, its keys, how much lies above it, top-k's key or -1, how many tokens with this key top-k keeps,
    the weight of all tokens that it keeps)
    """
    top, last_key = tl.div_rn(largest, safe_temperature), _keys(largest.to(dtype), BITS).to(tl.int64)
    low, count, above = tl.full([], 0, tl.int64), last_key + 1, tl.full([], 0, tl.int64)
    key_k, ties_k, total = tl.full([], -1, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if level > 0:
        before = level - 1
        at = states + (row * 2 * LEVELS + before) * FIELDS
        low, count, above = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        key_k, ties_k, total = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
        e_E = tl.arange(0, EDGES)
        sum_E = tl.load(sums_at_edges + (row * 2 * LEVELS + before) * EDGES + e_E)
        counts, weighs = has_k & (before < LEVELS), _adds_weights(before, has_k, has_p, LEVELS)
        within = before % LEVELS
        if weighs & (within == 0):
            weight_k = _weights(_number(tl.maximum(key_k, 0), dtype, BITS), safe_temperature, top, WEIGHT_OF_BEST)
            total = tl.sum(tl.where(e_E == EDGES - 1, sum_E, 0), 0) + ties_k * weight_k
        if (counts | weighs) & (count > 1):
            edge_E = _edges(low, count, within, top, safe_temperature, dtype, BITS, EDGES)
            enough_E = tl.where(counts, sum_E >= k, sum_E.to(tl.float64) >= _wanted(p, total)) & (e_E < EDGES - 1)
            digit = tl.sum(enough_E.to(tl.int32), 0)
            end = tl.where(digit < EDGES - 1, tl.sum(tl.where(e_E == digit, edge_E, 0), 0), low + count)
            above = tl.where(digit < EDGES - 1, tl.sum(tl.where(e_E == digit, sum_E, 0), 0), above)
            low = tl.where(digit > 0, tl.sum(tl.where(e_E == digit - 1, edge_E, 0), 0), low)
            count = end - low
        if counts & (within == LEVELS - 1):
            key_k, ties_k, count, above = low, k - above, last_key - low + 1, above * 0
    return low, count, above, key_k, ties_k, total


@triton.jit(do_not_specialize=["stride_row", "width", "slices"])
def row_tops_kernel(
    logits,  # [R, V], any float type
    tops,  # [R, S] float32
    sums_at_edges,  # [R, 2 * L, E] int64
    stride_row, width, slices,
    SLICE: tl.constexpr, LEVELS: tl.constexpr, EDGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest logit of each slice; and all sums at edges become 0."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_N = part * SLICE + tl.arange(0, SLICE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_N = tl.load(logits + row * stride_row + i_N, mask=i_N < width, other=-float("inf")).to(tl.float32)
    tl.store(tops + row * slices + part, tl.max(x_N, 0))
    if part == 0:
        for level in range(2 * LEVELS):
            tl.store(sums_at_edges + (row * 2 * LEVELS + level) * EDGES + tl.arange(0, EDGES), tl.zeros([EDGES], tl.int64))


@triton.jit(do_not_specialize=["stride_row", "stride_floats", "stride_ints", "each", "width", "slices", "level"])
def narrow_kernel(
    logits,  # [R, V], any float type
    tops,  # [R, S] float32
    sums_at_edges,  # [R, 2 * L, E] int64
    states,  # [R, 2 * L, FIELDS] int64
    temperatures, top_k, top_p,  # [B] float32, int64, float32
    stride_row, stride_floats, stride_ints, each, width, slices, level,
    SLICE: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr,
    EDGES: tl.constexpr, FIELDS: tl.constexpr, WEIGHT_OF_BEST: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One level: how much of a slice lies at or above each edge.  each: rows of a sequence.  SLICES: S, padded."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    safe_temperature, k, p, has_k, has_p = _options(temperatures, top_k, top_p, row // each, stride_floats, stride_ints, width)
    largest = _largest(tops, row, slices, SLICES)
    dtype: tl.constexpr = logits.dtype.element_ty
    low, count, above, key_k, ties_k, total = _state(
        states, sums_at_edges, row, level, k, p, has_k, has_p, safe_temperature, largest,
        dtype, BITS, LEVELS, EDGES, FIELDS, WEIGHT_OF_BEST,
    )  # fmt: skip
    if part == 0:
        at = states + (row * 2 * LEVELS + level) * FIELDS
        tl.store(at, low)
        tl.store(at + 1, count)
        tl.store(at + 2, above)
        tl.store(at + 3, key_k)
        tl.store(at + 4, ties_k)
        tl.store(at + 5, total)
    counts, weighs, within = has_k & (level < LEVELS), _adds_weights(level, has_k, has_p, LEVELS), level % LEVELS
    e_E, top = tl.arange(0, EDGES), tl.div_rn(largest, safe_temperature)
    edge_E = _edges(low, count, within, top, safe_temperature, dtype, BITS, EDGES)
    all_E = tl.where(weighs & (within == 0), key_k + 1, low + count)  # of what top-k keeps, its cutoff's tokens aside
    edge_E = tl.where(e_E < EDGES - 1, edge_E, all_E)
    first_edge = tl.min(edge_E, 0)
    highest = _keys(tl.load(tops + row * slices + part).to(dtype), BITS)
    if (counts | weighs) & ((count > 1) | (within == 0)) & (highest >= first_edge):
        sum_EN = tl.zeros([EDGES, BLOCK], tl.int64)
        for step in tl.static_range(SLICE // BLOCK):
            i_N = part * SLICE + step * BLOCK + tl.arange(0, BLOCK)
            x_N = tl.load(logits + row * stride_row + i_N, mask=i_N < width, other=-float("inf"))
            key_N = _keys(x_N, BITS)
            if tl.max(key_N, 0) >= first_edge:
                weight_N = tl.where(counts, 1, _weights(x_N.to(tl.float32), safe_temperature, top, WEIGHT_OF_BEST))
                weight_N = tl.where(i_N < width, weight_N, 0)
                sum_EN = _added(sum_EN, weight_N, key_N, edge_E, BITS, ASM)
        tl.atomic_add(sums_at_edges + (row * 2 * LEVELS + level) * EDGES + e_E, tl.sum(sum_EN, 1))


@triton.jit
def _ties(above, weight, wanted):
    """How many tokens of that weight top-p keeps after those above: those before which there is less than wanted."""
    weight = tl.maximum(weight, 1)
    ties = tl.maximum(((wanted - above.to(tl.float64)) / weight.to(tl.float64)).to(tl.int64), 0)
    for _ in tl.static_range(2):  # the quotient was rounded
        ties -= ((ties > 0) & ((above + (ties - 1) * weight).to(tl.float64) >= wanted)).to(tl.int64)
    for _ in tl.static_range(2):
        ties += ((above + ties * weight).to(tl.float64) < wanted).to(tl.int64)
    return ties


@triton.jit(do_not_specialize=["stride_row", "stride_floats", "stride_ints", "each", "width", "slices"])
def cutoff_kernel(
    logits,  # [R, V], any float type
    tops,  # [R, S] float32
    sums_at_edges,  # [R, 2 * L, E] int64
    states,  # [R, 2 * L, FIELDS] int64
    cutoff_logit, last_id, min_scaled,  # [R] float32, int64, float32
    temperatures, top_k, top_p, min_p,  # [B] float32, int64, float32, float32
    stride_row, stride_floats, stride_ints, each, width, slices,
    SCAN: tl.constexpr, SLICES: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr,
    EDGES: tl.constexpr, FIELDS: tl.constexpr, WEIGHT_OF_BEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The cutoff, after all levels: which of the tokens with the cutoff's logit is the last one kept."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    safe_temperature, k, p, has_k, has_p = _options(temperatures, top_k, top_p, row // each, stride_floats, stride_ints, width)
    largest = _largest(tops, row, slices, SLICES)
    dtype: tl.constexpr = logits.dtype.element_ty
    low, count, above, key_k, ties_k, total = _state(
        states, sums_at_edges, row, 2 * LEVELS, k, p, has_k, has_p, safe_temperature, largest,
        dtype, BITS, LEVELS, EDGES, FIELDS, WEIGHT_OF_BEST,
    )  # fmt: skip
    top = tl.div_rn(largest, safe_temperature)
    key = tl.where(has_p, low, tl.maximum(key_k, 0))
    number = _number(key, dtype, BITS)
    ties = _ties(above, _weights(number, safe_temperature, top, WEIGHT_OF_BEST), _wanted(p, total))
    ties = tl.where(has_p, tl.where(key == key_k, tl.minimum(ties, ties_k), ties), ties_k)
    found, end = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64) + width - 1
    if has_k | has_p:
        for first in range(0, width, SCAN):
            i_N = first + tl.arange(0, SCAN)
            x_N = tl.load(logits + row * stride_row + i_N, mask=i_N < width, other=-float("inf"))
            is_tie_N = (_keys(x_N, BITS) == key) & (i_N < width)
            here = tl.sum(is_tie_N.to(tl.int32), 0)
            if (found < ties) & (found + here >= ties):
                nth_N = tl.cumsum(is_tie_N.to(tl.int32), 0)
                end = tl.min(tl.where(is_tie_N & (nth_N == ties - found), i_N, width), 0).to(tl.int64)
            found += here
    else:
        number = -float("inf")
    share_of_best = tl.load(min_p + row // each * stride_floats).to(tl.float64)
    depth = tl.where(share_of_best > 0.0, tl.log(tl.maximum(share_of_best, 1e-300)), -float("inf"))
    tl.store(cutoff_logit + row, number)
    tl.store(last_id + row, end)
    tl.store(min_scaled + row, top + depth.to(tl.float32))


def launch_cutoffs(logits_RV: Tensor, filters: Filters) -> Cutoff:
    """`cutoff.cutoffs`."""
    (R, V), device = logits_RV.shape, logits_RV.device
    floats = filters.temperature_B, filters.top_p_B, filters.min_p_B
    assert logits_RV.stride(1) == 1 and all(x.dtype == torch.float32 and x.stride() == floats[0].stride() for x in floats)
    assert filters.top_k_B.dtype == torch.int64 and R % filters.top_k_B.shape[0] == 0
    bits = 8 * logits_RV.element_size()
    levels, slices = 1 + bits // 4, triton.cdiv(V, SLICE)  # after the first one 16 edges divide what is left each time
    tops = torch.empty(R, slices, dtype=torch.float32, device=device)
    sums_at_edges = torch.empty(R, 2 * levels, EDGES, dtype=torch.int64, device=device)
    states = torch.empty(R, 2 * levels, FIELDS, dtype=torch.int64, device=device)
    logit_R, min_scaled_R = torch.empty(2, R, dtype=torch.float32, device=device)
    last_id_R = torch.empty(R, dtype=torch.int64, device=device)
    if R:
        more = dict(num_warps=8, **chained(device))
        shapes = dict(
            SLICES=triton.next_power_of_2(slices), BITS=bits, LEVELS=levels, EDGES=EDGES, FIELDS=FIELDS,
            WEIGHT_OF_BEST=WEIGHT_OF_BEST,
        )  # fmt: skip
        options = filters.temperature_B, filters.top_k_B, filters.top_p_B
        sizes = logits_RV.stride(0), floats[0].stride(0), filters.top_k_B.stride(0), R // filters.top_k_B.shape[0], V, slices
        row_tops_kernel[(R, slices)](
            logits_RV, tops, sums_at_edges, logits_RV.stride(0), V, slices, SLICE=SLICE, LEVELS=levels, EDGES=EDGES, **more
        )
        for level in range(2 * levels):
            narrow_kernel[(R, slices)](
                logits_RV, tops, sums_at_edges, states, *options, *sizes, level, SLICE=SLICE, BLOCK=BLOCK,
                ASM=logits_RV.is_cuda, **shapes, **more,
            )  # fmt: skip
        cutoff_kernel[(R,)](
            logits_RV, tops, sums_at_edges, states, logit_R, last_id_R, min_scaled_R, *options, filters.min_p_B, *sizes,
            SCAN=SCAN, **shapes, **more,
        )  # fmt: skip
    return Cutoff(logit_R, last_id_R, min_scaled_R)
