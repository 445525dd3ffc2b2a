"""What a tree's nodes have to do with each other in Kimi's delta rule: all of it that no state is needed for.

For each row and head the system of `rule.on_paths` is solved as a matrix T, so that what is left is linear in the state:

    right = v - (r exp(D) k) S        u = T right        out = (f exp(D) q) S + A right

with r and f one over the lengths of raw keys and queries, and D the log-decays summed along each node's path, of each channel.
A program computes T, A, r and f of one row and head, and leaves D and keys for a later pass.  rule_triton.py reads all of them
but the keys, in several programs a head.

Shapes: as of kimi_delta.py; M: N, and 16 at least.  P: rows and columns of T and A that are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.kimi.pairs_triton import (
    coarse_pairs,
    fine_pairs,
    on_diagonal,
    sums_of,
    thirds,
    tokens_channels,
    walked_pairs,
)
from specdec.ops.recurrent.shared_triton import EPS, squares, strengths, unit_inverse


@triton.jit
def kimi_nodes_kernel(
    y, a, b,  # [B * N, 2 H K + H V], [B * N, H K], [B * N, H]
    A_log, dt_bias,  # [H], [H K]
    k_left, decay_left,  # [L, .., H, K] twice
    write,  # [B]
    parents,  # [B, N]
    solved,  # [B, H, 2 P P + 2 P]: A, T, f, r
    stride_y, stride_a, stride_b, stride_k, stride_decay,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr, CHAIN: tl.constexpr,
    HALVINGS: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, P: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, h = tl.program_id(1).to(tl.int64), tl.program_id(0)
    m = tl.arange(0, M)
    at_M, ok_M = row * N + m, m < N
    if CHAIN:
        parents_M = tl.maximum(m - 1, 0)
    else:
        parents_M = tl.load(parents + at_M, mask=ok_M, other=0, cache_modifier=".cg").to(tl.int32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.load(write + row)
    from_y, from_a, from_bias = y + at_M * stride_y + h * K, a + at_M * stride_a + h * K, dt_bias + h * K
    beta_M = strengths(tl.load(b + at_M * stride_b + h, mask=ok_M, other=0.0))
    q_squares, k_squares, totals_M = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        q_MK, k_MK, decay_MK = tokens_channels(from_y, from_a, from_bias, A_log + h, k, ok_M, H * K)
        q_squares += squares(q_MK)
        k_squares += squares(k_MK)
        totals_M += tl.sum(decay_MK, 1)
    # Numbers of a node that are not finite may reach those below it alone: `rule.without_broken`.
    sound_M = (q_squares < float("inf")) & (k_squares < float("inf")) & (totals_M > float("-inf")) & (beta_M == beta_M)
    q_length, k_length = tl.rsqrt(q_squares + EPS) * K**-0.5, tl.rsqrt(k_squares + EPS)
    to_left_M, sound_M1 = (m * H + h) * K, sound_M[:, None]
    beta_M, to_decays_M = tl.where(sound_M, beta_M, 0.0), decay_left + number * stride_decay + to_left_M
    to_keys_M = k_left + number * stride_k + to_left_M
    fine_qk, fine_kk = tl.zeros([M // 16, 16, 16], tl.float32), tl.zeros([M // 16, 16, 16], tl.float32)
    qk_MM, kk_MM, mask_MM = tl.zeros([M, M], tl.float32), tl.zeros([M, M], tl.float32), m[:, None] >= m[None, :]
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        q_MK, k_MK, decay_MK = tokens_channels(from_y, from_a, from_bias, A_log + h, k, ok_M, H * K)
        tl.store(to_keys_M[:, None] + k[None, :], k_MK * k_length[:, None], mask=ok_M[:, None])
        q_MK, k_MK = tl.where(sound_M1, q_MK, 0.0), tl.where(sound_M1, k_MK, 0.0)
        decay_MK = tl.where(sound_M1, decay_MK, 0.0)
        if CHAIN and HALVINGS:
            fine_qk, fine_kk = fine_pairs(q_MK, k_MK, decay_MK, fine_qk, fine_kk, False, PRECISION)
            qk_MM, kk_MM = coarse_pairs(q_MK, k_MK, decay_MK, qk_MM, kk_MM, 4, HALVINGS, False, PRECISION)
        else:
            qk_MM, kk_MM, mask_MM = walked_pairs(q_MK, k_MK, decay_MK, parents_M, qk_MM, kk_MM, M, DEPTH)
        high, middle, low = thirds(decay_MK, False)
        tl.store(to_decays_M[:, None] + k[None, :], sums_of(mask_MM, high, middle, low), mask=ok_M[:, None])
    if CHAIN and HALVINGS:
        qk_MM, kk_MM = qk_MM + on_diagonal(fine_qk), kk_MM + on_diagonal(fine_kk)
    elif M > 64:  # a product that adds nothing leaves them where products find them: 128 KiB of shared memory in place of 256
        none_MS = tl.zeros([M, 16], tl.float32)
        qk_MM = tl.dot(none_MS, tl.trans(none_MS), qk_MM, input_precision="tf32")
        kk_MM = tl.dot(none_MS, tl.trans(none_MS), kk_MM, input_precision="tf32")
    qk_MM, kk_MM = qk_MM * q_length[:, None] * k_length[None, :], kk_MM * (beta_M * k_length)[:, None] * k_length[None, :]
    sound_MM = sound_M[:, None] & sound_M[None, :]  # lengths of others may be NaN
    qk_MM, kk_MM = tl.where(sound_MM, qk_MM, 0.0), tl.where(sound_MM, kk_MM, 0.0)
    solved_MM = unit_inverse(kk_MM, M, DEPTH, HALVINGS, PRECISION) * beta_M[None, :]
    outer_MM = tl.dot(qk_MM, solved_MM, input_precision=PRECISION)
    own = solved + (row * H + h) * (2 * P * P + 2 * P)
    to_MM, kept_MM = own + m[:, None] * P + m[None, :], (m < P)[:, None] & (m < P)[None, :]
    tl.store(to_MM, outer_MM, mask=kept_MM)
    tl.store(to_MM + P * P, solved_MM, mask=kept_MM)
    tl.store(own + 2 * P * P + m, tl.where(sound_M, q_length, float("nan")), mask=m < P)
    tl.store(own + 2 * P * P + P + m, tl.where(sound_M, k_length, 0.0), mask=m < P)
