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
    y = y + row * stride_y
    q_K, k_K = tl.load(y + g * K + k).to(tl.float32), tl.load(y + (G + g) * K + k).to(tl.float32)
    x_V = tl.load(y + 2 * G * K + h * V + v).to(tl.float32)
    gates = read_gates(dt + row * stride_dt + h, A_log + h, dt_bias + h, D + h)
    number = tl.load(write + row)
    if AT_ONCE:
        left = read_path(from_k, from_u_V, from_decay, path, 0, accepted, G, H, K, V, GROUP, K)
    state_KV = with_path(raw, left, from_k, from_u_V, from_decay, path, accepted, E, G, H, K, V, GROUP)
    tl.store(to_state_KV + number * stride_state, state_KV)
    out_V, u_V = outputs(state_KV, q_K, k_K, x_V, gates)
    tl.store(out + (row * H + h) * V + v, out_V.to(out.dtype.element_ty))
    tl.store(u_left + number * stride_u + h * V + v, u_V)
    if block == 0:
        tl.store(decay_left + number * stride_decay + h, gates[1])
        if h % (H // G) == 0:
            tl.store(k_left + number * stride_k + g * K + k, k_K)


@triton.jit
def read_gates(dt, A_log, dt_bias, D):
    """(how far the step goes, its log-decay, the share of x that goes into the output)."""
    step = softplus(tl.load(dt).to(tl.float32) + tl.load(dt_bias).to(tl.float32))
    return step, -tl.exp(tl.load(A_log).to(tl.float32)) * step, tl.load(D).to(tl.float32)


@triton.jit
def with_path(
    raw, left, from_k, from_u_V, from_decay, path, accepted, E: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The state after the pending path, of whose first nodes left is what `read_path` gave."""
    decays, added, keys, last = left
    tiles = add_path(faded(raw, last, 1), decays, added, keys, last, 1, GROUP)
    if E > GROUP:
        tiles = add_rest(tiles, from_k, from_u_V, from_decay, path, accepted, G, H, K, V, GROUP, K)
    return tiles[0]


@triton.jit
def outputs(state_KV, q_K, k_K, x_V, gates):
    """(the node's output, u).  gates: as of `read_gates`."""
    step, decay, skip = gates
    u_V = step * x_V
    return tl.exp(decay) * tl.sum(q_K[:, None] * state_KV, 0) + tl.sum(q_K * k_K, 0) * u_V + skip * x_V, u_V
