"""The kernel of what blocks of a part need that no state enters, in Kimi's rule: see launch.py.

It knows no block beside its own.

Shapes: as of specdec/ops/recurrent/kimi_delta.py; N tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.chunks.prepare_triton import store_inverse, tokens_of_block
from specdec.ops.recurrent.kimi.pairs_triton import halved_pairs, sums_of, thirds
from specdec.ops.recurrent.shared_triton import EPS, log_decays, squares, strengths


@triton.jit(do_not_specialize=["B"])
def kimi_prepare_kernel(
    y, a, b,  # [T, 2 H K + H V], [T, H K], [T, H]
    A_log, dt_bias,  # [H], [H K]
    cu,  # [B + 1]
    after,  # [B]
    solved,  # [1 or 2, H, T, N]
    reads,  # [H, T, N]
    decays,  # [H, T, K]: log-decays summed from the block's beginning on
    lengths,  # [H, T, 2]: one over those of raw queries, scaled, and keys
    B, T, stride_y, stride_a, stride_b,
    H: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, LOG_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SEARCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    h, n, k = tl.program_id(0), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, end = tokens_of_block(tl.program_id(1), cu, after, B, BLOCK_N, SEARCH)
    if begin == end:
        return
    at_N = begin.to(tl.int64) + n
    ok_N, i, j, own_N = at_N < end, n[:, None], n[None, :], h.to(tl.int64) * T + at_N
    is_short: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    qk_NN, kk_NN = tl.zeros([BLOCK_N, BLOCK_N], tl.float32), tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    q_squares, k_squares = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for step in range(K // BLOCK_K):
        channel = h * K + step * BLOCK_K + k
        from_q_NK = y + at_N[:, None] * stride_y + channel[None, :]
        q_NK = tl.load(from_q_NK, mask=ok_N[:, None], other=0.0).to(tl.float32)
        k_NK = tl.load(from_q_NK + H * K, mask=ok_N[:, None], other=0.0).to(tl.float32)
        raw_NK = tl.load(a + at_N[:, None] * stride_a + channel[None, :], mask=ok_N[:, None], other=0.0)
        decay_NK = tl.where(ok_N[:, None], log_decays(raw_NK, A_log + h, dt_bias + channel[None, :]), 0.0)
        q_squares += squares(q_NK)
        k_squares += squares(k_NK)
        qk_NN, kk_NN = halved_pairs(q_NK, k_NK, decay_NK, qk_NN, kk_NN, BLOCK_N, LOG_N, is_short, PRECISION)
        first, second, third = thirds(decay_NK, is_short)
        to_decays_NK = decays + own_N[:, None] * K + (step * BLOCK_K + k)[None, :]
        tl.store(to_decays_NK, sums_of(i >= j, first, second, third), mask=ok_N[:, None])
    q_length, k_length = tl.rsqrt(q_squares + EPS) * K**-0.5, tl.rsqrt(k_squares + EPS)
    tl.store(lengths + own_N[:, None] * 2 + tl.arange(0, 2)[None, :], tl.join(q_length, k_length), mask=ok_N[:, None])
    beta_N = strengths(tl.load(b + at_N * stride_b + h, mask=ok_N, other=0.0))
    to_NN = own_N[:, None] * BLOCK_N + j
    qk_NN, kk_NN = qk_NN * q_length[:, None] * k_length[None, :], kk_NN * (beta_N * k_length)[:, None] * k_length[None, :]
    tl.store(reads + to_NN, qk_NN.to(reads.dtype.element_ty), mask=ok_N[:, None])
    store_inverse(solved + to_NN, H * T.to(tl.int64) * BLOCK_N, kk_NN, beta_N, ok_N, BLOCK_N, LOG_N, PRECISION)
