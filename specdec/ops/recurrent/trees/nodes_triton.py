"""What a tree's nodes have to do with each other in the gated delta rule: all of it that no state is needed for.

For each row and head the system of `gated_delta.on_paths` is solved as a matrix T, so that what is left is linear in the state:

    right = v - r (k S)        u = T right        out = f (q S) + A right

with r and f what fades and lengths make of raw keys' and queries' products.  A program computes T, A, r and f of one row and
head, and leaves log-decays and keys for a later pass.  rule_triton.py reads them, in several programs a head.

Shapes: as of gated_delta.py; M: N, and 16 at least.  P: rows and columns of T and A that are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.shared_triton import EPS, alike, log_decays, squares, strengths, unit_inverse


@triton.jit
def tree_nodes_kernel(
    y, a, b,  # [B * N, 2 G K + H V], [B * N, H] twice
    A_log, dt_bias,  # [H]
    k_left, decay_left,  # [L, .., G, K], [L, .., H]
    write,  # [B]
    parents,  # [B, N]
    solved,  # [B, H, 2 P P + 2 P]: A, T, f, r
    stride_y, stride_a, stride_b, stride_k, stride_decay,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr, CHAIN: tl.constexpr,
    HALVINGS: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, P: tl.constexpr, MOST: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, h = tl.program_id(1).to(tl.int64), tl.program_id(0)
    g, m, k = h // (H // G), tl.arange(0, M), tl.arange(0, BLOCK_K)
    mask_MM = ancestors(parents + row * N, N, DEPTH, CHAIN, M)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number, at_M, ok_M = tl.load(write + row), row * N + m, m < N
    from_q_MK = y + g * K + at_M[:, None] * stride_y + k[None, :]
    queries, keys = (), ()
    for step in tl.static_range(K // BLOCK_K):
        queries = queries + (tl.load(from_q_MK + step * BLOCK_K, mask=ok_M[:, None], other=0.0),)  # type: ignore[assignment]
        keys = keys + (tl.load(from_q_MK + G * K + step * BLOCK_K, mask=ok_M[:, None], other=0.0),)  # type: ignore[assignment]
    q_squares, k_squares = squares(queries[0]), squares(keys[0])  # type: ignore[misc]
    for step in tl.static_range(1, K // BLOCK_K):
        q_squares, k_squares = q_squares + squares(queries[step]), k_squares + squares(keys[step])
    decay_M = log_decays(tl.load(a + at_M * stride_a + h, mask=ok_M, other=0.0), tl.load(A_log + h), tl.load(dt_bias + h))
    beta_M = strengths(tl.load(b + at_M * stride_b + h, mask=ok_M, other=0.0), MOST)
    # Numbers of a node that are not finite may reach those below it alone: `gated_delta.without_broken`.
    sound_M = (q_squares < float("inf")) & (k_squares < float("inf")) & (tl.abs(decay_M) < float("inf")) & (beta_M == beta_M)
    q_length, k_length = tl.rsqrt(q_squares + EPS) * K**-0.5, tl.rsqrt(k_squares + EPS)
    decay_M, beta_M = tl.where(sound_M, decay_M, 0.0), tl.where(sound_M, beta_M, 0.0)
    summed_M = tl.sum(tl.where(mask_MM, decay_M[None, :], 0.0), 1)
    if tl.program_id(0) % (H // G) == 0:
        to_k_MK = k_left + number * stride_k + (m * G + g)[:, None] * K + k[None, :]
        for step in tl.static_range(K // BLOCK_K):
            tl.store(to_k_MK + step * BLOCK_K, keys[step].to(tl.float32) * k_length[:, None], mask=ok_M[:, None])
    tl.store(decay_left + number * stride_decay + m * H + h, summed_M, mask=ok_M)
    sound_MM, qk_MM = sound_M[:, None] & sound_M[None, :], tl.zeros([M, M], tl.float32)
    kk_MM = qk_MM
    for step in tl.static_range(K // BLOCK_K):
        qk_MM, kk_MM = alike(queries[step], keys[step], qk_MM, PRECISION), alike(keys[step], keys[step], kk_MM, PRECISION)
    qk_MM = qk_MM * q_length[:, None] * k_length[None, :]
    kk_MM = kk_MM * k_length[:, None] * k_length[None, :]
    qk_MM, kk_MM = tl.where(sound_MM, qk_MM, 0.0), tl.where(sound_MM, kk_MM, 0.0)
    # Of nodes on different branches the difference may be large: it never meets exp.
    fade_MM = tl.exp(tl.where(mask_MM, summed_M[:, None] - summed_M[None, :], float("-inf")))
    system_MM = tl.where(m[:, None] > m[None, :], kk_MM * fade_MM * beta_M[:, None], 0.0)
    solved_MM = unit_inverse(system_MM, M, DEPTH, HALVINGS, PRECISION) * beta_M[None, :]
    outer_MM = tl.dot(qk_MM * fade_MM, solved_MM, input_precision=PRECISION)
    faded_M = tl.exp(summed_M)
    own = solved + (row * H + h) * (2 * P * P + 2 * P)
    to_MM, kept_MM = own + m[:, None] * P + m[None, :], (m < P)[:, None] & (m < P)[None, :]
    tl.store(to_MM, outer_MM, mask=kept_MM)
    tl.store(to_MM + P * P, solved_MM, mask=kept_MM)
    tl.store(own + 2 * P * P + m, tl.where(sound_M, faded_M * q_length, float("nan")), mask=m < P)
    tl.store(own + 2 * P * P + P + m, tl.where(sound_M, faded_M * k_length, 0.0), mask=m < P)


@triton.jit
def ancestors(parents, N: tl.constexpr, DEPTH: tl.constexpr, CHAIN: tl.constexpr, M: tl.constexpr):
    """Whether node j is i or above i [M, M]."""
    m = tl.arange(0, M)
    if CHAIN:
        return m[:, None] >= m[None, :]
    mask_MM, above_M = m[:, None] == m[None, :], m
    parents_M = tl.load(parents + m, mask=m < N, other=0, cache_modifier=".cg").to(tl.int32)
    for _ in range(DEPTH):
        above_M = tl.gather(parents_M, above_M, 0)
        mask_MM = mask_MM | (above_M[:, None] == m[None, :])
    return mask_MM
