"""The kernel of `gated_delta.tree_outputs` where each tree is one node, as in plain decoding.

A program computes some columns of a head's values.  It reads its part of the state once, adds the pending path, and writes it
once.  All of that but the writing comes before its wait: states and what nodes left are a round old.

Shapes: as of gated_delta.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.shared_triton import EPS, log_decays, strengths
from specdec.ops.recurrent.trees.path_triton import add_path, add_rest, faded, read_path, read_state


@triton.jit
def step_rule_kernel(
    y, a, b,  # [B, 2 G K + H V], [B, H] twice
    A_log, dt_bias,  # [H]
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., G, K], [L, .., H, V], [L, .., H]
    read, write, count,  # [B]
    path,  # [B, E]
    out,  # [B, H, V]
    stride_y, stride_a, stride_b, stride_state, stride_k, stride_u, stride_decay,
    E: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, h, block = tl.program_id(1).to(tl.int64), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    g, k, v = h // (H // G), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    STEPS: tl.constexpr = K // BLOCK_K
    number, accepted = tl.load(read + row, cache_modifier=".cg"), tl.load(count + row, cache_modifier=".cg")
    to_state_KV = state + h * K * V + k[:, None] * V + v[None, :]
    from_k, from_decay = k_left + number * stride_k + g * K, decay_left + number * stride_decay + h
    from_u_V, path = u_left + number * stride_u + h * V + v, path + row * E
    raw = read_state(to_state_KV + number * stride_state, K, V, BLOCK_K)
    decays, added, keys, last = read_path(from_k, from_u_V, from_decay, path, 0, accepted, G, H, K, V, GROUP, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.load(write + row)
    from_q_K, queries, own = y + row * stride_y + g * K + k, (), ()
    for step in tl.static_range(STEPS):
        queries = queries + (tl.load(from_q_K + step * BLOCK_K).to(tl.float32),)  # type: ignore[assignment]
        own = own + (tl.load(from_q_K + G * K + step * BLOCK_K).to(tl.float32),)  # type: ignore[assignment]
    v_V = tl.load(y + row * stride_y + 2 * G * K + h * V + v).to(tl.float32)
    decay = log_decays(tl.load(a + row * stride_a + h), tl.load(A_log + h), tl.load(dt_bias + h))
    beta = strengths(tl.load(b + row * stride_b + h), MOST)
    tiles = add_path(faded(raw, last, STEPS), decays, added, keys, last, STEPS, GROUP)
    if E > GROUP:
        tiles = add_rest(tiles, from_k, from_u_V, from_decay, path, accepted, G, H, K, V, GROUP, BLOCK_K)
    for step in tl.static_range(STEPS):
        tl.store(to_state_KV + number * stride_state + step * BLOCK_K * V, tiles[step])
    q_state_V, k_state_V, sums = _products(queries, own, tiles, STEPS)
    q_length, k_length = tl.rsqrt(sums[0] + EPS) * K**-0.5, tl.rsqrt(sums[1] + EPS)
    less = tl.exp(decay)
    u_V = beta * (v_V - less * (k_state_V * k_length))
    out_V = less * (q_state_V * q_length) + sums[2] * q_length * k_length * u_V
    tl.store(out + (row * H + h) * V + v, out_V.to(out.dtype.element_ty))
    tl.store(u_left + number * stride_u + h * V + v, u_V)
    if block == 0:
        tl.store(decay_left + number * stride_decay + h, decay)
        if h % (H // G) == 0:
            for step in tl.static_range(STEPS):
                tl.store(k_left + number * stride_k + g * K + step * BLOCK_K + k, own[step] * k_length)


@triton.jit
def _products(queries, keys, tiles, STEPS: tl.constexpr):
    """(the state with the query [V], with the key [V]; the squares of query and key, and their product)."""
    q_K, k_K = queries[0], keys[0]
    q_state_V, k_state_V = tl.sum(q_K[:, None] * tiles[0], 0), tl.sum(k_K[:, None] * tiles[0], 0)
    q_squares, k_squares, alike = tl.sum(q_K * q_K, 0), tl.sum(k_K * k_K, 0), tl.sum(q_K * k_K, 0)
    for step in tl.static_range(1, STEPS):
        q_K, k_K = queries[step], keys[step]
        q_state_V, k_state_V = (
            q_state_V + tl.sum(q_K[:, None] * tiles[step], 0),
            k_state_V + tl.sum(k_K[:, None] * tiles[step], 0),
        )
        q_squares, k_squares, alike = (
            q_squares + tl.sum(q_K * q_K, 0),
            k_squares + tl.sum(k_K * k_K, 0),
            alike + tl.sum(q_K * k_K, 0),
        )
    return q_state_V, k_state_V, (q_squares, k_squares, alike)
