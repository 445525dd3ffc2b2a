"""The kernel of what blocks of a part need that no state enters: see launch.py.  It knows no block beside its own.

Shapes: as of specdec/ops/recurrent/gated_delta.py; N tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.shared_triton import EPS, alike, log_decays, squares, strengths

FACTORS = 4  # of a token and head
SMALL = tl.constexpr(16)  # rows of the blocks of the diagonal that are inverted by themselves


@triton.jit(do_not_specialize=["B"])
def chunk_prepare_kernel(
    y, a, b,  # [T, 2 G K + H V], [T, H] twice
    A_log, dt_bias,  # [H]
    cu,  # [B + 1]
    after,  # [B]
    solved,  # [1 or 2, H, T, N]
    reads,  # [H, T, N]
    factors,  # [H, T, 4]: of keys that read the state, of queries that do, of keys that are added to it, of itself
    B, T, stride_y, stride_a, stride_b,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, MOST: tl.constexpr,
    BLOCK_N: tl.constexpr, LOG_N: tl.constexpr, BLOCK_K: tl.constexpr, SEARCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    h, n = tl.program_id(0), tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, end = tokens_of_block(tl.program_id(1), cu, after, B, BLOCK_N, SEARCH)
    if begin == end:
        return
    at_N = begin.to(tl.int64) + n
    ok_N = at_N < end
    from_k_NK = y + (G + h // (H // G)) * K + at_N[:, None] * stride_y + tl.arange(0, BLOCK_K)[None, :]
    kk, k_length = _products(from_k_NK, from_k_NK, ok_N, K, PRECISION, BLOCK_N, BLOCK_K)
    decay_N = log_decays(tl.load(a + at_N * stride_a + h, mask=ok_N, other=0.0), tl.load(A_log + h), tl.load(dt_bias + h))
    decay_N = tl.where(ok_N, decay_N, 0.0)
    beta_N = strengths(tl.load(b + at_N * stride_b + h, mask=ok_N, other=0.0), MOST)
    i, j = n[:, None], n[None, :]
    summed_N = tl.cumsum(decay_N, 0)
    # Above the diagonal the difference may be large: it never meets exp.
    fade_NN = tl.exp(tl.where(i >= j, summed_N[:, None] - summed_N[None, :], float("-inf"))) * k_length[None, :]
    system_NN = tl.where(i > j, kk * fade_NN * (beta_N * k_length)[:, None], 0.0)
    to_NN = (h.to(tl.int64) * T + at_N)[:, None] * BLOCK_N + j
    _store_inverse(solved + to_NN, H * T.to(tl.int64) * BLOCK_N, system_NN, beta_N, ok_N, BLOCK_N, LOG_N, PRECISION)
    qk, q_length = _products(from_k_NK - G * K, from_k_NK, ok_N, K, PRECISION, BLOCK_N, BLOCK_K)
    q_length *= K**-0.5
    tl.store(reads + to_NN, (qk * fade_NN * q_length[:, None]).to(reads.dtype.element_ty), mask=ok_N[:, None])
    last, faded_N = tl.sum(decay_N, 0), tl.exp(summed_N)
    added_N = tl.exp(tl.minimum(last - summed_N, 0.0)) * k_length
    state_N = tl.exp(last) + tl.zeros([BLOCK_N], tl.float32)
    factors_N22 = tl.join(tl.join(faded_N * k_length, added_N), tl.join(faded_N * q_length, state_N))
    to_N4 = factors + (h.to(tl.int64) * T + at_N)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(to_N4, tl.reshape(factors_N22, [BLOCK_N, 4]), mask=ok_N[:, None])


@triton.jit
def tokens_of_block(block, cu, after, B, N: tl.constexpr, SEARCH: tl.constexpr):
    """(its first token, where it ends): the same where there is no such block.  A block also ends where a state is kept."""
    before, begin, end = block * 0, block * 0, block * 0
    for first in range(0, B, SEARCH):
        part = first + tl.arange(0, SEARCH)
        begin_P = tl.load(cu + part, mask=part < B, other=0)
        kept_P = tl.load(after + part, mask=part < B, other=0)
        tokens_P = tl.load(cu + part + 1, mask=part < B, other=0) - begin_P
        kept_blocks_P = tl.cdiv(kept_P, N)
        blocks_P = kept_blocks_P + tl.cdiv(tokens_P - kept_P, N)
        index_P = block - before - (tl.cumsum(blocks_P, 0) - blocks_P)
        is_mine_P = (index_P >= 0) & (index_P < blocks_P)
        is_late_P = index_P >= kept_blocks_P
        first_P = tl.where(is_late_P, kept_P + (index_P - kept_blocks_P) * N, index_P * N)
        end_P = tl.minimum(first_P + N, tl.where(is_late_P, tokens_P, kept_P))
        begin += tl.sum(tl.where(is_mine_P, begin_P + first_P, 0), 0)
        end += tl.sum(tl.where(is_mine_P, begin_P + end_P, 0), 0)
        before += tl.sum(blocks_P, 0)
    return begin, end


@triton.jit
def _products(
    from_x_NK, from_k_NK, ok_N, K: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Of queries or keys with keys [N, N], as they lie, and the former's inverse lengths."""
    lengths, products = tl.zeros([N], tl.float32), tl.zeros([N, N], tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        x_NK = tl.load(from_x_NK + step * BLOCK_K, mask=ok_N[:, None], other=0.0)
        k_NK = tl.load(from_k_NK + step * BLOCK_K, mask=ok_N[:, None], other=0.0)
        lengths += squares(x_NK)
        products = alike(x_NK, k_NK, products, PRECISION)
    return products, tl.rsqrt(lengths + EPS)


@triton.jit
def _store_inverse(
    to_NN, stride_part, system_NN, beta_N, ok_N, N: tl.constexpr, LOG_N: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """In two halves, if it is stored in 16 bits."""
    is_short: tl.constexpr = to_NN.dtype.element_ty == tl.bfloat16
    solved_NN = block_inverse(system_NN, N, LOG_N, PRECISION, is_short) * beta_N[None, :]
    if is_short:
        high_NN, low_NN = halves(solved_NN)
        tl.store(to_NN, high_NN, mask=ok_N[:, None])
        tl.store(to_NN + stride_part, low_NN, mask=ok_N[:, None])
    else:
        tl.store(to_NN, solved_NN, mask=ok_N[:, None])


@triton.jit
def block_inverse(system_NN, N: tl.constexpr, LOG_N: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr):
    """Of 1 + a strictly lower triangular matrix.

    Blocks of the diagonal are inverted, each time of twice the size: [[A, 0], [C, B]] has [[1/A, 0], [-1/B C 1/A, 1/B]].
    Those of 16 rows by themselves: products of whole matrices would be mostly zeros.
    """
    PARTS: tl.constexpr = N // SMALL
    r, c = tl.arange(0, PARTS)[:, None, None, None], tl.arange(0, PARTS)[None, None, :, None]
    small = tl.sum(tl.where(r == c, tl.reshape(system_NN, [PARTS, SMALL, PARTS, SMALL]), 0.0), 2)
    i, j = tl.arange(0, SMALL)[None, :, None], tl.arange(0, SMALL)[None, None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -small, 0.0))
    for step in tl.static_range(1, 4):
        between = tl.where(((i >> (step + 1)) == (j >> (step + 1))) & ((i >> step) != (j >> step)), small, 0.0)
        inverse -= tl.dot(inverse, tl.dot(between, inverse, input_precision=PRECISION), input_precision=PRECISION)
    inverse_NN = tl.reshape(tl.where(r == c, inverse[:, :, None, :], 0.0), [N, N])
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    for step in tl.static_range(4, LOG_N):
        between = tl.where(((i >> (step + 1)) == (j >> (step + 1))) & ((i >> step) != (j >> step)), system_NN, 0.0)
        if SHORT:
            high, low = halves(inverse_NN)
            inverse_NN -= of_halves(high, low, *halves(of_halves(*halves(between), high, low)))
        else:
            between = tl.dot(between, inverse_NN, input_precision=PRECISION)
            inverse_NN -= tl.dot(inverse_NN, between, input_precision=PRECISION)
    return inverse_NN


@triton.jit
def of_halves(x_high, x_low, y_high, y_low):
    """Their product, without that of the lower halves."""
    return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))


@triton.jit
def halves(x_MN):
    """x as the sum of two 16-bit numbers: 17 bits of it are kept.

    Veltkamp's way to round to 8 bits: the hardware converts pairs of numbers fast, and single ones slowly.  Each step is an
    fma by name: of products and sums the compiler would make such ones that nothing is rounded, and no second half is left.
    """
    high_MN = tl.fma(x_MN, -65536.0, tl.fma(x_MN, 65536.0, x_MN))
    return high_MN.to(tl.bfloat16), (x_MN - high_MN).to(tl.bfloat16)
