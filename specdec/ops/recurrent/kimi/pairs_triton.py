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

from specdec.ops.recurrent.chunks.prepare_triton import halves, of_halves
from specdec.ops.recurrent.shared_triton import log_decays


@triton.jit
def walked_pairs(q_NK, k_NK, decay_NK, parents_N, qk_NN, kk_NN, N: tl.constexpr, DEPTH: tl.constexpr):
    """(qk, kk), each with the products that these channels add, and whether node j is i or above i [N, N], of a tree.

    kk: of different nodes alone.  All in float32.  parents_N: int32; the root's own is the root.
    """
    n = tl.arange(0, N)
    mask_NN, at_N = n[:, None] == n[None, :], n
    qk_NN += tl.where(mask_NN, tl.sum(q_NK * k_NK, 1)[:, None], 0.0)
    below_N, seen_NK = n >= 0, k_NK
    less_NK, rows_NK = tl.exp(decay_NK), parents_N[:, None] + tl.zeros_like(decay_NK).to(tl.int32)
    for _ in range(DEPTH):
        below_N = below_N & (at_N != 0)
        at_N = tl.gather(parents_N, at_N, 0)
        seen_NK = tl.gather(seen_NK, rows_NK, 0) * less_NK
        here_NN = below_N[:, None] & (at_N[:, None] == n[None, :])
        qk_NN += tl.where(here_NN, tl.sum(q_NK * seen_NK, 1)[:, None], 0.0)
        kk_NN += tl.where(here_NN, tl.sum(k_NK * seen_NK, 1)[:, None], 0.0)
        mask_NN = mask_NN | here_NN
    return qk_NN, kk_NN, mask_NN


@triton.jit
def fine_pairs(q_NK, k_NK, decay_NK, qk_PSS, kk_PSS, SHORT: tl.constexpr, PRECISION: tl.constexpr):
    """(qk, kk), each with the products that these channels add inside of blocks of 16 tokens of a chain.

    kk: of different tokens alone.  q, k: float32.  SHORT: products of two halves of 16 bits each.  P blocks of S tokens.
    """
    P: tl.constexpr = qk_PSS.shape[0]
    S: tl.constexpr = qk_PSS.shape[1]
    K: tl.constexpr = q_NK.shape[1]
    q_PSK, k_PSK, decay_PSK = tl.reshape(q_NK, [P, S, K]), tl.reshape(k_NK, [P, S, K]), tl.reshape(decay_NK, [P, S, K])
    s = tl.arange(0, S)
    i, j = s[:, None], s[None, :]
    qk_PSS += tl.where((i == j)[None, :, :], tl.sum(q_PSK * k_PSK, 2)[:, :, None], 0.0)
    first, second, third = thirds(decay_PSK, SHORT)
    for step in range(4):
        fades_SS, is_pair_SS = _of_level(step, i, j)
        fades_PSS = tl.broadcast_to(fades_SS[None, :, :], [P, S, S])
        less_PSK = tl.exp(sums_of(fades_PSS, first, second, third))
        qk_step_PSS, kk_step_PSS = _products(q_PSK * less_PSK, k_PSK * less_PSK, SHORT, PRECISION)
        qk_PSS += tl.where(is_pair_SS[None, :, :], qk_step_PSS, 0.0)
        kk_PSS += tl.where(is_pair_SS[None, :, :], kk_step_PSS, 0.0)
    return qk_PSS, kk_PSS


@triton.jit
def coarse_pairs(
    q_NK, k_NK, decay_NK, qk_NN, kk_NN, FIRST: tl.constexpr, HALVINGS: tl.constexpr, SHORT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(qk, kk), each with the products that these channels add between blocks of 2^FIRST tokens of a chain of 2^HALVINGS."""
    n = tl.arange(0, q_NK.shape[0])
    first, second, third = thirds(decay_NK, SHORT)
    for step in range(FIRST, HALVINGS):
        fades_NN, is_pair_NN = _of_level(step, n[:, None], n[None, :])
        less_NK = tl.exp(sums_of(fades_NN, first, second, third))
        qk_step_NN, kk_step_NN = _products(q_NK * less_NK, k_NK * less_NK, SHORT, PRECISION)
        qk_NN += tl.where(is_pair_NN, qk_step_NN, 0.0)
        kk_NN += tl.where(is_pair_NN, kk_step_NN, 0.0)
    return qk_NN, kk_NN


@triton.jit
def _of_level(step, i, j):
    """(the tokens j whose decays fade token i on its way from or to its border, pairs that this border parts).

    A late token fades from the border in front of its half on, an early one to the border behind its half.
    """
    is_late = ((i >> step) & 1) == 1
    fades = ((i >> step) == (j >> step)) & tl.where(is_late, j <= i, j > i)
    return fades, ((i >> (step + 1)) == (j >> (step + 1))) & is_late & (((j >> step) & 1) == 0)


@triton.jit
def on_diagonal(x_PSS):
    """A matrix of those blocks, and zeros beside them."""
    P: tl.constexpr = x_PSS.shape[0]
    S: tl.constexpr = x_PSS.shape[1]
    r, c = tl.arange(0, P)[:, None, None, None], tl.arange(0, P)[None, None, :, None]
    return tl.reshape(tl.where(r == c, x_PSS[:, :, None, :], 0.0), [P * S, P * S])


@triton.jit
def _products(q, k, SHORT: tl.constexpr, PRECISION: tl.constexpr):
    """Of queries with keys, and of keys with keys."""
    if SHORT:
        q_high, q_low = halves(q)
        k_high, k_low = halves(k)
        turned_high, turned_low = _turned(k_high), _turned(k_low)
        qk = of_halves(q_high, q_low, turned_high, turned_low)
        kk = of_halves(k_high, k_low, turned_high, turned_low)
    else:
        qk = tl.dot(q, _turned(k), input_precision=PRECISION)
        kk = tl.dot(k, _turned(k), input_precision=PRECISION)
    return qk, kk


@triton.jit
def _turned(x):
    return tl.trans(x) if len(x.shape) == 2 else tl.permute(x, (0, 2, 1))


@triton.jit
def thirds(x, SHORT: tl.constexpr):
    """x as the sum of three numbers that bf16 (SHORT) or tf32 hold exactly."""
    if SHORT:
        rounded = tl.fma(x, -65536.0, tl.fma(x, 65536.0, x))  # Veltkamp's way: see `halves`
        middle, low = halves(x - rounded)
        high = rounded.to(tl.bfloat16)
    else:
        high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # the bits that tf32 has
        rest = x - high
        middle = (rest.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        low = rest - middle
    return high, middle, low


@triton.jit
def sums_of(mask, first, second, third):
    """For each row of the mask the sum of those rows of what `thirds` gives, as exact as sums of float32 numbers are."""
    ones = tl.where(mask, 1.0, 0.0).to(first.dtype)
    low = tl.dot(ones, second, tl.dot(ones, third, input_precision="tf32"), input_precision="tf32")
    return tl.dot(ones, first, low, input_precision="tf32")


@triton.jit
def tokens_channels(from_q_N, from_a_N, dt_bias, A_log, channel_K, ok_N, to_keys: tl.constexpr):
    """(queries, keys, log-decays) of some channels, in float32; zeros of padding."""
    ok_N1 = ok_N[:, None]
    q_NK = tl.load(from_q_N[:, None] + channel_K[None, :], mask=ok_N1, other=0.0).to(tl.float32)
    k_NK = tl.load(from_q_N[:, None] + to_keys + channel_K[None, :], mask=ok_N1, other=0.0).to(tl.float32)
    a_NK = tl.load(from_a_N[:, None] + channel_K[None, :], mask=ok_N1, other=0.0)
    decay_NK = log_decays(a_NK, tl.load(A_log), tl.load(dt_bias + channel_K)[None, :])
    return q_NK, k_NK, tl.where(ok_N1, decay_NK, 0.0)
