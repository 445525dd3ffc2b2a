"""What the kernels of trees and of parts share: gates, products, and the inverse of a small system.

Everything is float32.  A product of float32 numbers is three of tf32 ("tf32x3"); 16-bit numbers are exact in tf32, so that two
do where the other side is cut in two.  Both have about the error of float32 ("ieee").

Shapes: N tokens, K a part of keys' width, V a block of values' width, S any number of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent import gated_delta

EPS = tl.constexpr(gated_delta.EPS)
PRECISION = "tf32x3"


@triton.jit
def softplus(x_N):
    """log(1 + exp(x)) of float32 numbers."""
    small_N = tl.exp(-tl.abs(x_N))
    # log(1 + small) = 2 atanh(t), as a polynomial of t^2, which is 1/9 at most: small numbers keep all of their bits.
    t_N = small_N / (2.0 + small_N)
    z_N = t_N * t_N
    log_N = t_N * (2.0 + z_N * (0.66666316 + z_N * (0.40024854 + z_N * (0.27961419 + z_N * 0.28174657))))
    return tl.maximum(x_N, 0.0) + log_N


@triton.jit
def log_decays(a_N, A_log, dt_bias):
    """Of values a of one head, whose weights the other two are: -exp(A_log) * softplus(a + dt_bias)."""
    return -tl.exp(A_log.to(tl.float32)) * softplus(a_N.to(tl.float32) + dt_bias.to(tl.float32))


@triton.jit
def strengths(b_N, MOST: tl.constexpr = 1.0):
    """Between 0 and MOST; the sigmoid is rounded to b's dtype."""
    return tl.sigmoid(b_N.to(tl.float32)).to(b_N.dtype).to(tl.float32) * MOST


@triton.jit
def multiplied(x_NK, w_KV, sums_NV, PRECISION: tl.constexpr):
    """sums + x w.  x: in the model's dtype; w: float32."""
    is_short: tl.constexpr = x_NK.dtype.primitive_bitwidth == 16
    x_NK = x_NK.to(tl.float32)
    if is_short and PRECISION == "tf32x3":
        high_KV = (w_KV.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # the bits that tf32 has
        sums_NV = tl.dot(x_NK, w_KV - high_KV, sums_NV, input_precision="tf32")
        return tl.dot(x_NK, high_KV, sums_NV, input_precision="tf32")
    return tl.dot(x_NK, w_KV, sums_NV, input_precision=PRECISION)


@triton.jit
def weighted(w_NM, x_MV, sums_NV, PRECISION: tl.constexpr):
    """sums + w x.  w: float32; x: in the model's dtype."""
    is_short: tl.constexpr = x_MV.dtype.primitive_bitwidth == 16
    x_MV = x_MV.to(tl.float32)
    if is_short and PRECISION == "tf32x3":
        high_NM = (w_NM.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # the bits that tf32 has
        sums_NV = tl.dot(w_NM - high_NM, x_MV, sums_NV, input_precision="tf32")
        return tl.dot(high_NM, x_MV, sums_NV, input_precision="tf32")
    return tl.dot(w_NM, x_MV, sums_NV, input_precision=PRECISION)


@triton.jit
def alike(x_NK, y_NK, sums_NN, PRECISION: tl.constexpr):
    """sums + x y^T of queries or keys, in the model's dtype: 16-bit numbers have exact products."""
    is_short: tl.constexpr = x_NK.dtype.primitive_bitwidth == 16
    return tl.dot(x_NK, tl.trans(y_NK), sums_NN, input_precision="ieee" if is_short else PRECISION)


@triton.jit
def squares(x_NK):
    """Their sum, for each row."""
    x_NK = x_NK.to(tl.float32)
    return tl.sum(x_NK * x_NK, 1)


@triton.jit
def _inverse(system_NN, N: tl.constexpr, HALVINGS: tl.constexpr, PRECISION: tl.constexpr):
    """Of 1 + a strictly lower triangular matrix.

    Blocks of the diagonal are inverted, each time of twice the size: [[A, 0], [C, B]] has [[1/A, 0], [-1/B C 1/A, 1/B]].
    """
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    inverse_NN = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -system_NN, 0.0))
    for step in range(1, HALVINGS):
        is_between = ((i >> (step + 1)) == (j >> (step + 1))) & ((i >> step) != (j >> step))
        between_NN = tl.dot(tl.where(is_between, system_NN, 0.0), inverse_NN, input_precision=PRECISION)
        inverse_NN -= tl.dot(inverse_NN, between_NN, input_precision=PRECISION)
    return inverse_NN


@triton.jit
def unit_inverse(system_NN, N: tl.constexpr, DEPTH: tl.constexpr, HALVINGS: tl.constexpr, PRECISION: tl.constexpr):
    """Of 1 + a strictly lower triangular matrix: by halves (HALVINGS: log2(N)), or if that is 0 by powers.

    x = -system, whose powers above DEPTH, 7 at most, are 0: 1 + x + e + x e with e = x^2 + x^4 + x^6.  The terms of more powers
    would grow and cancel each other.
    """
    n = tl.arange(0, N)
    if HALVINGS:
        inverse_NN = _inverse(system_NN, N, HALVINGS, PRECISION)
    else:
        x_NN = -system_NN
        inverse_NN = tl.where(n[:, None] == n[None, :], 1.0, x_NN)
        if DEPTH > 1:
            even_NN = tl.dot(x_NN, x_NN, input_precision=PRECISION)
            if DEPTH > 3:
                fourth_NN = tl.dot(even_NN, even_NN, input_precision=PRECISION)
                if DEPTH > 5:
                    even_NN = tl.dot(even_NN, fourth_NN, even_NN, input_precision=PRECISION)
                even_NN += fourth_NN
            inverse_NN += even_NN
            if DEPTH > 2:
                inverse_NN = tl.dot(x_NN, even_NN, inverse_NN, input_precision=PRECISION)
    return inverse_NN
