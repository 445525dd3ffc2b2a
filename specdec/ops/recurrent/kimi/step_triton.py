"""The kernel of `kimi_delta.tree_outputs` where each tree is one node, as in plain decoding.

A program computes some columns of a head's values.  It reads its part of the state once, adds the pending path, and writes it
once.  All of that but the writing comes before its wait: states and what nodes left are a round old.

Shapes: as of kimi_delta.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.kimi.path_triton import add_kimi_path, add_kimi_rest, kimi_faded, read_kimi_path
from specdec.ops.recurrent.shared_triton import EPS, log_decays, strengths
from specdec.ops.recurrent.trees.path_triton import read_state


@triton.jit
def kimi_step_kernel(
    y, a, b,  # [B, 2 H K + H V], [B, H K], [B, H]
    A_log, dt_bias,  # [H], [H K]
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., H, K], [L, .., H, V], [L, .., H, K]
    read, write, count,  # [B]
    path,  # [B, E]
    out,  # [B, H, V]
    stride_y, stride_a, stride_b, stride_state, stride_k, stride_u, stride_decay,
    E: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, h, block = tl.program_id(1).to(tl.int64), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    k, v = tl.arange(0, K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    number, accepted = tl.load(read + row, cache_modifier=".cg"), tl.load(count + row, cache_modifier=".cg")
    to_state_KV = state + h * K * V + k[:, None] * V + v[None, :]
    from_k, from_decay = k_left + number * stride_k + h * K, decay_left + number * stride_decay + h * K
    from_u_V, path = u_left + number * stride_u + h * V + v, path + row * E
    raw = read_state(to_state_KV + number * stride_state, K, V, K)
    decays, added, keys, last = read_kimi_path(from_k, from_u_V, from_decay, path, 0, accepted, H, K, V, GROUP, K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.load(write + row)
    y += row * stride_y + h * K
    q_K, k_K = tl.load(y + k).to(tl.float32), tl.load(y + H * K + k).to(tl.float32)
    v_V = tl.load(y - h * K + 2 * H * K + h * V + v).to(tl.float32)
    decay_K = log_decays(tl.load(a + row * stride_a + h * K + k), tl.load(A_log + h), tl.load(dt_bias + h * K + k))
    beta = strengths(tl.load(b + row * stride_b + h))
    tiles = add_kimi_path(kimi_faded(raw, last, 1), decays, added, keys, last, 1, GROUP)
    if E > GROUP:
        tiles = add_kimi_rest(tiles, from_k, from_u_V, from_decay, path, accepted, H, K, V, GROUP, K)
    tl.store(to_state_KV + number * stride_state, tiles[0])
    q_K *= tl.rsqrt(tl.sum(q_K * q_K, 0) + EPS) * K**-0.5
    k_K *= tl.rsqrt(tl.sum(k_K * k_K, 0) + EPS)
    less_K = tl.exp(decay_K)
    q_state_V, k_state_V = tl.sum((q_K * less_K)[:, None] * tiles[0], 0), tl.sum((k_K * less_K)[:, None] * tiles[0], 0)
    u_V = beta * (v_V - k_state_V)
    out_V = q_state_V + tl.sum(q_K * k_K, 0) * u_V
    tl.store(out + (row * H + h) * V + v, out_V.to(out.dtype.element_ty))
    tl.store(u_left + number * stride_u + h * V + v, u_V)
    if block == 0:
        tl.store(decay_left + number * stride_decay + h * K + k, decay_K)
        tl.store(k_left + number * stride_k + h * K + k, k_K)
