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

from specdec.ops.recurrent.kimi.pairs_triton import coarse_pairs, fine_pairs, on_diagonal, sums_of, thirds, walked_pairs
from specdec.ops.recurrent.shared_triton import EPS, log_decays, squares, strengths, unit_inverse


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
    HALVINGS: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, h = tl.program_id(1).to(tl.int64), tl.program_id(0)
    m, k = tl.arange(0, M), tl.arange(0, K)
    at_M, ok_M = row * N + m, m < N
    if CHAIN:
        parents_M = tl.maximum(m - 1, 0)
    else:
        parents_M = tl.load(parents + at_M, mask=ok_M, other=0, cache_modifier=".cg").to(tl.int32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.load(write + row)
    from_q_MK = y + h * K + at_M[:, None] * stride_y + k[None, :]
    q_MK = tl.load(from_q_MK, mask=ok_M[:, None], other=0.0).to(tl.float32)
    k_MK = tl.load(from_q_MK + H * K, mask=ok_M[:, None], other=0.0).to(tl.float32)
    from_a_MK = a + h * K + at_M[:, None] * stride_a + k[None, :]
    raw_MK = tl.load(from_a_MK, mask=ok_M[:, None], other=0.0)
    beta_M = strengths(tl.load(b + at_M * stride_b + h, mask=ok_M, other=0.0))
    decay_MK = log_decays(raw_MK, A_log + h, dt_bias + h * K + k[None, :])
    q_squares, k_squares, total_M = squares(q_MK), squares(k_MK), tl.sum(decay_MK, 1)
    # Numbers of a node that are not finite may reach those below it alone: `rule.without_broken`.
    sound_M = (q_squares < float("inf")) & (k_squares < float("inf")) & (total_M > float("-inf")) & (beta_M == beta_M)
    q_length, k_length = tl.rsqrt(q_squares + EPS) * K**-0.5, tl.rsqrt(k_squares + EPS)
    to_left_MK = (m * H + h)[:, None] * K + k[None, :]
    tl.store(k_left + number * stride_k + to_left_MK, k_MK * k_length[:, None], mask=ok_M[:, None])
    q_MK, k_MK = tl.where(sound_M[:, None], q_MK, 0.0), tl.where(sound_M[:, None], k_MK, 0.0)
    decay_MK, beta_M = tl.where((sound_M & ok_M)[:, None], decay_MK, 0.0), tl.where(sound_M, beta_M, 0.0)
    if HALVINGS and CHAIN:
        none, mask_MM = tl.zeros([M // 16, 16, 16], tl.float32), m[:, None] >= m[None, :]
        qk, kk = fine_pairs(q_MK, k_MK, decay_MK, none, none, False, PRECISION)
        qk_MM, kk_MM = on_diagonal(qk), on_diagonal(kk)
        qk_MM, kk_MM = coarse_pairs(q_MK, k_MK, decay_MK, qk_MM, kk_MM, 4, HALVINGS, False, PRECISION)
    else:
        qk_MM, kk_MM, mask_MM = walked_pairs(q_MK, k_MK, decay_MK, parents_M, M, DEPTH)
    first, second, third = thirds(decay_MK, False)
    summed_MK = sums_of(mask_MM, first, second, third)
    tl.store(decay_left + number * stride_decay + to_left_MK, summed_MK, mask=ok_M[:, None])
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
