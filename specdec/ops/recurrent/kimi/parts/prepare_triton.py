"""The kernel of what blocks of a part need that no state enters, in Kimi's rule: see launch.py.

It knows no block beside its own.  Channels are worked on in two turns, first for products of tokens with each other, then for
what meets the state: lengths and the system's inverse come from all channels.

Shapes: as of specdec/ops/recurrent/kimi_delta.py; N tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.chunks.prepare_triton import block_inverse, halves, of_halves, tokens_of_block
from specdec.ops.recurrent.kimi.pairs_triton import coarse_pairs, fine_pairs, on_diagonal, sums_of, thirds, tokens_channels
from specdec.ops.recurrent.shared_triton import EPS, squares, strengths


@triton.jit(do_not_specialize=["B"])
def kimi_prepare_kernel(
    y, a, b,  # [T, 2 H K + H V], [T, H K], [T, H]
    A_log, dt_bias,  # [H], [H K]
    cu,  # [B + 1]
    after,  # [B]
    keys,  # [1 or 2, H, T, K]
    queries,  # [H, T, K]
    added,  # [1 or 2, H, T, K]
    values,  # [H, T, V]
    reads,  # [H, T, N]
    ends,  # [H, blocks, K]
    B, T, stride_y, stride_a, stride_b,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, LOG_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SEARCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    h, number, n, k = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, end = tokens_of_block(number, cu, after, B, BLOCK_N, SEARCH)
    if begin == end:
        return
    at_N = begin.to(tl.int64) + n
    ok_N, i, j, own_N, rows = at_N < end, n[:, None], n[None, :], h.to(tl.int64) * T + at_N, H * T.to(tl.int64)
    is_short: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    from_y, from_a, from_bias = y + at_N * stride_y + h * K, a + at_N * stride_a + h * K, dt_bias + h * K
    fine_qk, fine_kk = tl.zeros([BLOCK_N // 16, 16, 16], tl.float32), tl.zeros([BLOCK_N // 16, 16, 16], tl.float32)
    qk_NN, kk_NN = tl.zeros([BLOCK_N, BLOCK_N], tl.float32), tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    q_squares, k_squares = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        q_NK, k_NK, decay_NK = tokens_channels(from_y, from_a, from_bias, A_log + h, first + k, ok_N, H * K)
        q_squares += squares(q_NK)
        k_squares += squares(k_NK)
        fine_qk, fine_kk = fine_pairs(q_NK, k_NK, decay_NK, fine_qk, fine_kk, is_short, PRECISION)
        qk_NN, kk_NN = coarse_pairs(q_NK, k_NK, decay_NK, qk_NN, kk_NN, 4, LOG_N, is_short, PRECISION)
    qk_NN, kk_NN = qk_NN + on_diagonal(fine_qk), kk_NN + on_diagonal(fine_kk)
    q_length, k_length = tl.rsqrt(q_squares + EPS) * K**-0.5, tl.rsqrt(k_squares + EPS)
    beta_N = strengths(tl.load(b + at_N * stride_b + h, mask=ok_N, other=0.0))
    qk_NN, kk_NN = qk_NN * q_length[:, None] * k_length[None, :], kk_NN * (beta_N * k_length)[:, None] * k_length[None, :]
    tl.store(reads + own_N[:, None] * BLOCK_N + j, qk_NN.to(reads.dtype.element_ty), mask=ok_N[:, None])
    solved_NN = block_inverse(kk_NN, BLOCK_N, LOG_N, PRECISION, is_short) * beta_N[None, :]
    for first in range(0, K, BLOCK_K):
        q_NK, k_NK, decay_NK = tokens_channels(from_y, from_a, from_bias, A_log + h, first + k, ok_N, H * K)
        high, middle, low = thirds(decay_NK, is_short)
        faded_NK, to_NK = tl.exp(sums_of(i >= j, high, middle, low)), own_N[:, None] * K + (first + k)[None, :]
        k_NK *= k_length[:, None]
        tl.store(queries + to_NK, (q_NK * q_length[:, None] * faded_NK).to(queries.dtype.element_ty), mask=ok_N[:, None])
        added_NK = k_NK * tl.exp(sums_of(i < j, high, middle, low))
        _store_parts(added + to_NK, rows * K, added_NK, ok_N)
        _store_parts(keys + to_NK, rows * K, -_product(solved_NN, k_NK * faded_NK, PRECISION, is_short), ok_N)
        tl.store(ends + (h.to(tl.int64) * tl.num_programs(1) + number) * K + first + k, tl.exp(tl.sum(decay_NK, 0)))
    for first in range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        from_v_NV = y + at_N[:, None] * stride_y + (2 * H * K + h * V + v)[None, :]
        v_NV = tl.load(from_v_NV, mask=ok_N[:, None], other=0.0)
        if is_short:
            high, low = halves(solved_NN)
            v_NV = tl.dot(high, v_NV, tl.dot(low, v_NV))
        else:
            v_NV = tl.dot(solved_NN, v_NV.to(tl.float32), input_precision=PRECISION)
        tl.store(values + own_N[:, None] * V + v[None, :], v_NV, mask=ok_N[:, None])


@triton.jit
def _product(x_NN, y_NK, PRECISION: tl.constexpr, SHORT: tl.constexpr):
    if SHORT:
        x_high, x_low = halves(x_NN)
        y_high, y_low = halves(y_NK)
        product_NK = of_halves(x_high, x_low, y_high, y_low)
    else:
        product_NK = tl.dot(x_NN, y_NK, input_precision=PRECISION)
    return product_NK


@triton.jit
def _store_parts(to_NK, stride_part, x_NK, ok_N):
    """In two halves, if it is stored in 16 bits."""
    if to_NK.dtype.element_ty == tl.bfloat16:
        high_NK, low_NK = halves(x_NK)
        tl.store(to_NK, high_NK, mask=ok_N[:, None])
        tl.store(to_NK + stride_part, low_NK, mask=ok_N[:, None])
    else:
        tl.store(to_NK, x_NK, mask=ok_N[:, None])
