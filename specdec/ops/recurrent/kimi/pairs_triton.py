"""Products of queries and keys with the keys before them, whose channels fade each by itself on the way from one to the other.

A pair's product is the sum over channels c of q_ic k_jc exp(D_ic - D_jc), with D the log-decays summed along i's path.  It is
no product of two matrices: exp(D_i) exp(-D_j) would overflow.  There are two ways around, and neither ever computes a
difference of large sums or a factor above 1.

- Walking.  What node i sees of its d-th ancestor's key is what its parent sees of its (d - 1)-th ancestor's, once more faded.
  So a level of a tree is a gather of rows and a product.
- Halving.  Tokens of a chain are cut into halves, halves of halves, ...: each pair is parted by one border, and each side fades
  from or to the border by itself.  So a level is a product of matrices.

Shapes: N tokens, K a part of keys' width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.chunks.prepare_triton import halves


@triton.jit
def walked_pairs(q_NK, k_NK, decay_NK, parents_N, N: tl.constexpr, DEPTH: tl.constexpr):
    """(products of queries with keys [N, N], of keys with keys, whether node j is i or above i) of a tree.  All in float32.

    parents_N: int32; the root's own is the root.
    """
    n = tl.arange(0, N)
    mask_NN, at_N = n[:, None] == n[None, :], n
    qk_NN = tl.where(mask_NN, tl.sum(q_NK * k_NK, 1)[:, None], 0.0)
    kk_NN, below_N, seen_NK = tl.zeros([N, N], tl.float32), n >= 0, k_NK
    less_NK, rows_NK = tl.exp(decay_NK), parents_N[:, None] + tl.zeros_like(decay_NK).to(tl.int32)
    for _ in range(DEPTH):
        below_N = below_N & (at_N != 0)
        at_N = tl.gather(parents_N, at_N, 0)
        seen_NK = tl.gather(seen_NK, rows_NK, 0) * less_NK
        here_NN = below_N[:, None] & (at_N[:, None] == n[None, :])
        qk_NN = tl.where(here_NN, tl.sum(q_NK * seen_NK, 1)[:, None], qk_NN)
        kk_NN = tl.where(here_NN, tl.sum(k_NK * seen_NK, 1)[:, None], kk_NN)
        mask_NN = mask_NN | here_NN
    return qk_NN, kk_NN, mask_NN


@triton.jit
def halved_pairs(
    q_NK, k_NK, decay_NK, qk_NN, kk_NN, N: tl.constexpr, HALVINGS: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """(qk, kk), each with the products that these channels add, of a chain of 2^HALVINGS tokens or less; kk: of pairs alone.

    q, k: float32.  SHORT: products of two halves of 16 bits each.
    """
    n = tl.arange(0, N)
    i, j = n[:, None], n[None, :]
    qk_NN += tl.where(i == j, tl.sum(q_NK * k_NK, 1)[:, None], 0.0)
    first, second, third = thirds(decay_NK, SHORT)
    for step in range(HALVINGS):
        is_late_N = ((n >> step) & 1) == 1
        # A late token fades from the border before its half on, an early one to the border behind its half.
        fades_NN = ((i >> step) == (j >> step)) & ((is_late_N[:, None] & (j <= i)) | (j > i) & ~is_late_N[:, None])
        less_NK = tl.exp(sums_of(fades_NN, first, second, third))
        is_pair_NN = ((i >> (step + 1)) == (j >> (step + 1))) & is_late_N[:, None] & ~is_late_N[None, :]
        qk_step_NN, kk_step_NN = _products(q_NK * less_NK, k_NK * less_NK, SHORT, PRECISION)
        qk_NN += tl.where(is_pair_NN, qk_step_NN, 0.0)
        kk_NN += tl.where(is_pair_NN, kk_step_NN, 0.0)
    return qk_NN, kk_NN


@triton.jit
def _products(q_NK, k_NK, SHORT: tl.constexpr, PRECISION: tl.constexpr):
    """(q k^T, k k^T)."""
    if SHORT:
        q_high, q_low = halves(q_NK)
        k_high, k_low = halves(k_NK)
        qk_NN = tl.dot(q_high, tl.trans(k_high), tl.dot(q_high, tl.trans(k_low), tl.dot(q_low, tl.trans(k_high))))
        kk_NN = tl.dot(k_high, tl.trans(k_high), tl.dot(k_high, tl.trans(k_low), tl.dot(k_low, tl.trans(k_high))))
    else:
        qk_NN = tl.dot(q_NK, tl.trans(k_NK), input_precision=PRECISION)
        kk_NN = tl.dot(k_NK, tl.trans(k_NK), input_precision=PRECISION)
    return qk_NN, kk_NN


@triton.jit
def thirds(x_NK, SHORT: tl.constexpr):
    """x as the sum of three numbers that bf16 (SHORT) or tf32 hold exactly."""
    if SHORT:
        high_NK = tl.fma(x_NK, -65536.0, tl.fma(x_NK, 65536.0, x_NK))  # Veltkamp's way: see `halves`
        middle, low = halves(x_NK - high_NK)
        high = high_NK.to(tl.bfloat16)
    else:
        high = (x_NK.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # the bits that tf32 has
        rest_NK = x_NK - high
        middle = (rest_NK.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        low = rest_NK - middle
    return high, middle, low


@triton.jit
def sums_of(mask_NN, first, second, third):
    """For each row of the mask the sum of those rows of what `thirds` gives, as exact as sums of float32 numbers are."""
    ones_NN = mask_NN.to(first.dtype)
    low_NK = tl.dot(ones_NN, second, tl.dot(ones_NN, third, input_precision="tf32"), input_precision="tf32")
    return tl.dot(ones_NN, first, low_NK, input_precision="tf32")
