"""The kernel of approximate_cutoff.py: one program for each row, which searches the edge by halves.

Shapes: R rows, N tokens of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.noise.approximate_cutoff import BINS, PER_UNIT, SHIFT
from specdec.ops.noise.filters import Filters

MAX_IN_REGISTERS = 32768  # tokens whose exponentials a program holds; of longer rows it computes them for every look
HALVINGS = (BINS - 1).bit_length()


@triton.jit
def _exponentials(logits, first, width, largest, scale, BLOCK: tl.constexpr):
    """exp of each logit's distance below the largest, after temperature; 0 after the row's end, and for NaN."""
    i_N = first + tl.arange(0, BLOCK)
    x_N = tl.load(logits + i_N, mask=i_N < width, other=-float("inf")).to(tl.float32)
    below_N = (x_N - largest) * scale
    return tl.where(below_N <= 0.0, tl.exp(below_N), 0.0)


@triton.jit
def _above(
    logits, e_N, width, largest, scale, last, COUNTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    PER_UNIT: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Of the tokens above an edge their number, or the sum of their exponentials.  e_N: those of the row, if WHOLE."""
    cut = tl.exp((last.to(tl.float32) + SHIFT) * (-1.0 / PER_UNIT))
    if WHOLE:
        return tl.sum(tl.where(e_N > cut, 1.0 if COUNTS else e_N, 0.0), 0)
    total_N = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        e_N = _exponentials(logits, first, width, largest, scale, BLOCK)
        total_N += tl.where(e_N > cut, 1.0 if COUNTS else e_N, 0.0)
    return tl.sum(total_N, 0)


@triton.jit
def _first_edge(
    logits, e_N, width, largest, scale, wanted, low, high, COUNTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    PER_UNIT: tl.constexpr, SHIFT: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """The first edge from `low` on above which there is as much as is wanted; `high` if there is none before it."""
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        found = _above(logits, e_N, width, largest, scale, middle, COUNTS, WHOLE, BLOCK, PER_UNIT, SHIFT)
        is_enough = found >= wanted
        high = tl.where(is_enough & (low < high), middle, high)
        low = tl.where(is_enough, low, tl.minimum(middle + 1, high))
    return high


@triton.jit(do_not_specialize=["each", "stride_floats", "stride_ints"])
def approximate_cutoff_kernel(
    logits,  # [R, W], any float type
    cutoff,  # [R] float32
    temperatures,  # [B] float32
    top_k,  # [B] int64
    top_p,  # [B] float32
    min_p,  # [B] float32
    stride_row,
    stride_floats,
    stride_ints,
    each,  # rows of a sequence
    width,  # W
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # whether a block is a row
    BINS: tl.constexpr,
    PER_UNIT: tl.constexpr,
    SHIFT: tl.constexpr,
    HALVINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = row // each
    temperature = tl.load(temperatures + b * stride_floats, cache_modifier=".cg")
    k = tl.load(top_k + b * stride_ints, cache_modifier=".cg")
    p = tl.load(top_p + b * stride_floats, cache_modifier=".cg")
    min_share = tl.load(min_p + b * stride_floats, cache_modifier=".cg")
    logits += row * stride_row
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    top_N = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, width, BLOCK):
        i_N = first + tl.arange(0, BLOCK)
        top_N = tl.maximum(top_N, tl.load(logits + i_N, mask=i_N < width, other=-float("inf")).to(tl.float32))
    largest = tl.max(top_N, 0)
    scale = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
    e_N = top_N
    if WHOLE:
        e_N = _exponentials(logits, 0, width, largest, scale, BLOCK)
    start = tl.full([], 0, tl.int32)
    last = tl.full([], BINS - 1, tl.int32)
    if k > 0:
        wanted = k.to(tl.float32)
        last = _first_edge(
            logits, e_N, width, largest, scale, wanted, start, last, True, WHOLE, BLOCK, PER_UNIT, SHIFT, HALVINGS
        )
    if p < 1.0:
        all_edges = tl.where(last < BINS - 1, last, 1 << 20)  # below the last edge lies the whole row
        wanted = p * _above(logits, e_N, width, largest, scale, all_edges, False, WHOLE, BLOCK, PER_UNIT, SHIFT)
        last = _first_edge(
            logits, e_N, width, largest, scale, wanted, start, last, False, WHOLE, BLOCK, PER_UNIT, SHIFT, HALVINGS
        )
    edge = largest - temperature * (last.to(tl.float32) + SHIFT) / PER_UNIT
    edge = tl.where(last < BINS - 1, edge, -float("inf"))
    min_logit = tl.where(min_share > 0.0, largest + temperature * tl.log(tl.maximum(min_share, 1e-30)), -float("inf"))
    edge = tl.maximum(edge, min_logit)
    tl.store(cutoff + row, tl.where(temperature > 0.0, edge, -float("inf")))


def launch_approximate_cutoffs(logits_RW: Tensor, filters: Filters) -> Tensor:
    """`approximate_cutoff.approximate_cutoffs`."""
    (R, W), floats = logits_RW.shape, (filters.temperature_B, filters.top_p_B, filters.min_p_B)
    assert logits_RW.stride(1) == 1 and all(x.dtype == torch.float32 and x.stride() == floats[0].stride() for x in floats)
    assert filters.top_k_B.dtype == torch.int64 and R % filters.top_k_B.shape[0] == 0
    out = torch.empty(R, dtype=torch.float32, device=logits_RW.device)
    block = min(MAX_IN_REGISTERS, triton.next_power_of_2(W))
    block = block if block >= W else 8192
    if R:
        approximate_cutoff_kernel[(R,)](
            logits_RW, out, filters.temperature_B, filters.top_k_B, filters.top_p_B, filters.min_p_B, logits_RW.stride(0),
            floats[0].stride(0), filters.top_k_B.stride(0), R // filters.top_k_B.shape[0], W, BLOCK=block, WHOLE=block >= W,
            BINS=BINS, PER_UNIT=PER_UNIT, SHIFT=SHIFT, HALVINGS=HALVINGS, num_warps=min(16, max(1, block // 512)),
            **chained(logits_RW.device),
        )  # fmt: skip
    return out
