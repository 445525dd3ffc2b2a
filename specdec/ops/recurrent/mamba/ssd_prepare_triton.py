"""The kernel of what blocks of a part need that no state enters: see launch.py.  It knows no block beside its own.

Shapes: as of specdec/ops/recurrent/ssd.py; N tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.chunks.prepare_triton import tokens_of_block
from specdec.ops.recurrent.shared_triton import alike, softplus

FACTORS = 2  # of a token and head


@triton.jit(do_not_specialize=["B"])
def ssd_prepare_kernel(
    y, dt,  # [T, 2 G K + H V], [T, H]
    A_log, dt_bias, D,  # [H]
    cu,  # [B + 1]
    after,  # [B]
    reads,  # [H, T, N]: how much of each value a token's output has
    factors,  # [H, T, 2]: of what a query reads of the state, and of a value that is added to it
    B, T, stride_y, stride_dt,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SEARCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's HEADS are of one group, whose products of queries and keys they share."""
    n, g = tl.arange(0, BLOCK_N), tl.program_id(0) * HEADS // (H // G)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, end = tokens_of_block(tl.program_id(1), cu, after, B, BLOCK_N, SEARCH)
    if begin == end:
        return
    at_N = begin.to(tl.int64) + n
    ok_N = at_N < end
    from_q_NK = y + g * K + at_N[:, None] * stride_y + tl.arange(0, BLOCK_K)[None, :]
    qk_NN = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        q_NK = tl.load(from_q_NK + step * BLOCK_K, mask=ok_N[:, None], other=0.0)
        k_NK = tl.load(from_q_NK + G * K + step * BLOCK_K, mask=ok_N[:, None], other=0.0)
        qk_NN = alike(q_NK, k_NK, qk_NN, PRECISION)
    i, j = n[:, None], n[None, :]
    for each in range(HEADS):
        h = tl.program_id(0) * HEADS + each
        dt_N = tl.load(dt + at_N * stride_dt + h, mask=ok_N, other=0.0).to(tl.float32)
        step_N = tl.where(ok_N, softplus(dt_N + tl.load(dt_bias + h).to(tl.float32)), 0.0)
        decay_N = -tl.exp(tl.load(A_log + h).to(tl.float32)) * step_N
        summed_N = tl.cumsum(decay_N, 0)
        # Above the diagonal the difference may be large: it never meets exp.
        fade_NN = tl.exp(tl.where(i >= j, summed_N[:, None] - summed_N[None, :], float("-inf")))
        reads_NN = qk_NN * fade_NN * step_N[None, :] + tl.where(i == j, tl.load(D + h).to(tl.float32), 0.0)
        at_HN = h.to(tl.int64) * T + at_N
        tl.store(reads + at_HN[:, None] * BLOCK_N + j, reads_NN.to(reads.dtype.element_ty), mask=ok_N[:, None])
        # Summed from the block's end on: differences of long sums would be inexact where they are small, and matter most.
        added_N = tl.exp(tl.minimum(tl.cumsum(decay_N, 0, reverse=True) - decay_N, 0.0)) * step_N
        to_N2 = factors + at_HN[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(to_N2, tl.join(tl.exp(summed_N), added_N), mask=ok_N[:, None])
