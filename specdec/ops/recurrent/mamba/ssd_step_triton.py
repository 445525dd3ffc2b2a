"""The kernel of `ssd.tree_outputs` where each tree is one node, as in plain decoding.

A program computes some columns of a head's values.  It reads its part of the state once, adds the pending path, and writes it
once.  All of that but the writing comes before its wait: states and what nodes left are a round old.

Shapes: as of ssd.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.shared_triton import softplus
from specdec.ops.recurrent.trees.path_triton import add_path, add_rest, faded, read_path, read_state


@triton.jit
def ssd_step_kernel(
    y, dt,  # [B, 2 G K + H V], [B, H]
    A_log, dt_bias, D,  # [H]
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., G, K], [L, .., H, V], [L, .., H]
    read, write, count,  # [B]
    path,  # [B, E]
    out,  # [B, H, V]
    stride_y, stride_dt, stride_state, stride_k, stride_u, stride_decay,
    E: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, h, block = tl.program_id(1).to(tl.int64), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    g, k, v = h // (H // G), tl.arange(0, K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    number, accepted = tl.load(read + row, cache_modifier=".cg"), tl.load(count + row, cache_modifier=".cg")
    to_state_KV = state + h * K * V + k[:, None] * V + v[None, :]
    from_k, from_decay = k_left + number * stride_k + g * K, decay_left + number * stride_decay + h
    from_u_V, path = u_left + number * stride_u + h * V + v, path + row * E
    raw = read_state(to_state_KV + number * stride_state, K, V, K)
    if not AT_ONCE:
        left = read_path(from_k, from_u_V, from_decay, path, 0, accepted, G, H, K, V, GROUP, K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number, y = tl.load(write + row), y + row * stride_y
    q_K, k_K = tl.load(y + g * K + k).to(tl.float32), tl.load(y + (G + g) * K + k).to(tl.float32)
    x_V = tl.load(y + 2 * G * K + h * V + v).to(tl.float32)
    step = softplus(tl.load(dt + row * stride_dt + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32))
    if AT_ONCE:
        left = read_path(from_k, from_u_V, from_decay, path, 0, accepted, G, H, K, V, GROUP, K)
    decays, added, keys, last = left
    decay, skip = -tl.exp(tl.load(A_log + h).to(tl.float32)) * step, tl.load(D + h).to(tl.float32)
    tiles = add_path(faded(raw, last, 1), decays, added, keys, last, 1, GROUP)
    if E > GROUP:
        tiles = add_rest(tiles, from_k, from_u_V, from_decay, path, accepted, G, H, K, V, GROUP, K)
    tl.store(to_state_KV + number * stride_state, tiles[0])
    u_V = step * x_V
    out_V = tl.exp(decay) * tl.sum(q_K[:, None] * tiles[0], 0) + tl.sum(q_K * k_K, 0) * u_V + skip * x_V
    tl.store(out + (row * H + h) * V + v, out_V.to(out.dtype.element_ty))
    tl.store(u_left + number * stride_u + h * V + v, u_V)
    if block == 0:
        tl.store(decay_left + number * stride_decay + h, decay)
        if h % (H // G) == 0:
            tl.store(k_left + number * stride_k + g * K + k, k_K)
