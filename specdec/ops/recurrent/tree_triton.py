"""The kernel of `gated_delta.tree_outputs`: a program computes some columns of a head's values for a whole tree.

It reads its part of the state once, adds the pending path, and writes it once.  All of that but the writing comes before its
wait: states and what nodes left are a round old.  No program reads what another one writes: see states.py.

Shapes: as of gated_delta.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.gated_delta import Gates
from specdec.ops.recurrent.shared_triton import EPS, PRECISION, log_decays, products, rule, squares, strengths
from specdec.ops.recurrent.states import LayerStates, TreeSteps, lie_whole

GROUP = 8  # accepted nodes that are read at once


class RuleTiles(NamedTuple):
    """A program's columns of values, the rows of the state that it multiplies at once, and its warps."""

    block_v: int
    block_k: int = 32
    warps: int = 4


def tree_tiles(sequences: int, nodes: int, value_heads: int) -> RuleTiles:
    """More columns share what a head's programs all compute.  Nothing of this is timed yet.

    On Hopper GPUs 32 columns spill no register up to 32 nodes, and 72 bytes of 60; 64 columns of 32 nodes spill 132 bytes.
    """
    return RuleTiles(64 if 16 < nodes <= 32 and sequences * value_heads >= 128 else 32)


@triton.jit
def tree_rule_kernel(
    y, a, b,  # [B * N, 2 G K + H V], [B * N, H] twice
    A_log, dt_bias,  # [H]
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., G, K], [L, .., H, V], [L, .., H]
    read, write, count,  # [B]
    path,  # [B, E]
    parents,  # [B, N]
    out,  # [B * N, H, V]
    stride_y, stride_a, stride_b, stride_state, stride_k, stride_u, stride_decay,
    N: tl.constexpr, E: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DEPTH: tl.constexpr, CHAIN: tl.constexpr, HALVINGS: tl.constexpr, PRECISION: tl.constexpr,
    PADDED_N: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, h, block = tl.program_id(1).to(tl.int64), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    g, n, v = h // (H // G), tl.arange(0, PADDED_N), block * BLOCK_V + tl.arange(0, BLOCK_V)
    number, accepted = tl.load(read + row, cache_modifier=".cg"), tl.load(count + row, cache_modifier=".cg")
    to_state_KV = state + h * K * V + tl.arange(0, BLOCK_K)[:, None] * V + v[None, :]
    tiles = _states_with_paths(
        to_state_KV + number * stride_state, k_left + number * stride_k + g * K,
        u_left + number * stride_u + h * V + v, decay_left + number * stride_decay + h, path + row * E, accepted,
        G, H, K, V, GROUP, BLOCK_K,
    )  # fmt: skip
    mask_NN, depth_N = _ancestors(parents + row * N, N, DEPTH, CHAIN, PADDED_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.load(write + row)
    for step in tl.static_range(K // BLOCK_K):
        tl.store(to_state_KV + number * stride_state + step * BLOCK_K * V, tiles[step])
    at_N, ok_N = row * N + n, n < N
    from_k_NK = y + (G + g) * K + at_N[:, None] * stride_y + tl.arange(0, BLOCK_K)[None, :]
    from_v_NV = y + 2 * G * K + h * V + at_N[:, None] * stride_y + v[None, :]
    v_NV = tl.load(from_v_NV, mask=ok_N[:, None], other=0.0).to(tl.float32)
    decay_N = log_decays(tl.load(a + at_N * stride_a + h, mask=ok_N, other=0.0), A_log + h, dt_bias + h)
    beta_N = strengths(tl.load(b + at_N * stride_b + h, mask=ok_N, other=0.0))
    if N == 1:
        qk, q_state, k_state, k_length = _products_of_one(from_k_NK, ok_N, tiles, G, K, BLOCK_K, BLOCK_V)
        faded = tl.exp(decay_N)[:, None]
        u_NV = beta_N[:, None] * (v_NV - faded * k_state)
        out_NV = faded * q_state + qk * u_NV
    else:
        qk, kk, q_state, k_state, k_length = products(from_k_NK, ok_N, tiles, G, K, PRECISION, PADDED_N, BLOCK_K, BLOCK_V)
        out_NV, u_NV, decay_N = _rule_of_sound(
            qk, kk, q_state, k_state, v_NV, decay_N, beta_N, mask_NN, depth_N, PADDED_N, DEPTH, HALVINGS, PRECISION
        )
    tl.store(out + (at_N * H + h)[:, None] * V + v[None, :], out_NV.to(out.dtype.element_ty), mask=ok_N[:, None])
    tl.store(u_left + number * stride_u + (n * H + h)[:, None] * V + v[None, :], u_NV, mask=ok_N[:, None])
    if block == 0:
        tl.store(decay_left + number * stride_decay + n * H + h, decay_N, mask=ok_N)
        if h % (H // G) == 0:
            to_k_NK = k_left + number * stride_k + (n * G + g)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
            _leave_keys(to_k_NK, from_k_NK, k_length, ok_N, K, BLOCK_K)


@triton.jit
def _rule_of_sound(
    qk_NN, kk_NN, q_state_NV, k_state_NV, v_NV, decay_N, beta_N, mask_NN, depth_N,
    N: tl.constexpr, DEPTH: tl.constexpr, HALVINGS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`rule` after `gated_delta.without_broken`.  Numbers that are not finite make NaN of a product with any state."""
    broken_NV = (q_state_NV != q_state_NV) | (k_state_NV != k_state_NV)
    sound_N = (tl.sum(broken_NV.to(tl.int32), 1) == 0) & (tl.abs(decay_N) < float("inf")) & (beta_N == beta_N)
    sound_NN, sound_N1 = sound_N[:, None] & sound_N[None, :], sound_N[:, None]
    sound_NV = sound_N1 & (tl.abs(v_NV) < float("inf"))
    out_NV, u_NV, summed_N = rule(
        tl.where(sound_NN, qk_NN, 0.0), tl.where(sound_NN, kk_NN, 0.0), tl.where(sound_N1, q_state_NV, 0.0),
        tl.where(sound_N1, k_state_NV, 0.0), tl.where(sound_NV, v_NV, 0.0), tl.where(sound_N, decay_N, 0.0),
        tl.where(sound_N, beta_N, 0.0), mask_NN, depth_N, N, DEPTH, HALVINGS, PRECISION,
    )  # fmt: skip
    return tl.where(sound_NV, out_NV, float("nan")), u_NV, summed_N


@triton.jit
def _products_of_one(from_k_NK, ok_N, tiles, G: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """`products` of one node, without products of blocks, which would be padded to 16 nodes.  kk: not needed."""
    q_state, k_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32), tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    q_squares, k_squares, qk = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        k_NK = tl.load(from_k_NK + step * BLOCK_K, mask=ok_N[:, None], other=0.0).to(tl.float32)
        q_NK = tl.load(from_k_NK + step * BLOCK_K - G * K, mask=ok_N[:, None], other=0.0).to(tl.float32)
        q_squares += squares(q_NK)
        k_squares += squares(k_NK)
        q_state += tl.trans(q_NK) * tiles[step]
        k_state += tl.trans(k_NK) * tiles[step]
        qk += tl.sum(q_NK * k_NK, 1)
    q_length, k_length = tl.rsqrt(q_squares + EPS) * K**-0.5, tl.rsqrt(k_squares + EPS)
    q_state, k_state = tl.sum(q_state, 0)[None, :] * q_length[:, None], tl.sum(k_state, 0)[None, :] * k_length[:, None]
    return (qk * q_length * k_length)[:, None], q_state, k_state, k_length


@triton.jit
def _leave_keys(to_k_NK, from_k_NK, k_length, ok_N, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Read again, so that no program keeps them while it multiplies."""
    for step in tl.static_range(K // BLOCK_K):
        k_NK = tl.load(from_k_NK + step * BLOCK_K, mask=ok_N[:, None], other=0.0)
        tl.store(to_k_NK + step * BLOCK_K, k_NK.to(tl.float32) * k_length[:, None], mask=ok_N[:, None])


@triton.jit
def _states_with_paths(
    state_KV, k_left, u_left, decay_left, path, accepted,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The blocks of rows of a state, with what the accepted nodes add.  The pointers: at their number, head and columns.

    Without an accepted node nothing is read of the number but the state: it may be one that holds no nodes.
    """
    end = tl.load(path + accepted - 1, mask=accepted > 0, other=0, cache_modifier=".cg")
    last = tl.load(decay_left + end * H, mask=accepted > 0, other=0.0, cache_modifier=".cg")
    tiles = ()
    for step in tl.static_range(K // BLOCK_K):
        tiles = tiles + (tl.exp(last) * tl.load(state_KV + step * BLOCK_K * V, cache_modifier=".cg"),)  # type: ignore[assignment]
    for first in range(0, accepted, GROUP):
        for e in tl.static_range(GROUP):  # all of which are read at once
            ok = first + e < accepted
            node = tl.load(path + first + e, mask=ok, other=0, cache_modifier=".cg")
            decay = tl.load(decay_left + node * H, mask=ok, other=float("inf"), cache_modifier=".cg")
            u_V = tl.load(u_left + node * H * V, mask=ok, other=0.0, cache_modifier=".cg") * tl.exp(last - decay)
            k_K = k_left + node * G * K + tl.arange(0, BLOCK_K)
            added = ()
            for step in tl.static_range(K // BLOCK_K):
                part_K = tl.load(k_K + step * BLOCK_K, mask=ok, other=0.0, cache_modifier=".cg")
                added = added + (tiles[step] + part_K[:, None] * u_V[None, :],)  # type: ignore[assignment]
            tiles = added
    return tiles


@triton.jit
def _ancestors(parents, N: tl.constexpr, DEPTH: tl.constexpr, CHAIN: tl.constexpr, PADDED_N: tl.constexpr):
    """(whether node j is i or above i [N, N], each node's depth [N])."""
    n = tl.arange(0, PADDED_N)
    mask_NN, depth_N, above_N = n[:, None] == n[None, :], tl.zeros([PADDED_N], tl.int32), n
    if CHAIN:
        return n[:, None] >= n[None, :], n
    parents_N = tl.load(parents + n, mask=n < N, other=0, cache_modifier=".cg").to(tl.int32)
    for _ in range(DEPTH):
        depth_N += (above_N > 0).to(tl.int32)
        above_N = tl.gather(parents_N, above_N, 0)
        mask_NN = mask_NN | (above_N[:, None] == n[None, :])
    return mask_NN, depth_N


def launch_tree_rule(
    y_TC: Tensor, gates: Gates, layer: LayerStates, steps: TreeSteps, precision: str = PRECISION, tiles: RuleTiles | None = None
) -> Tensor:
    """`gated_delta.tree_outputs`: [T, H, V].  precision: of products: "tf32x3" or "ieee"."""
    (B, N), E = steps.parents_BN.shape, steps.path_BE.shape[1]
    (_, H, K, V), G = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    check_rule(y_TC, gates, layer)
    assert lie_whole(steps)
    assert len(y_TC) == B * N and N <= layer.k_LNGK.shape[1]
    for left, size in ((layer.k_LNGK, G * K), (layer.u_LNHV, H * V), (layer.decay_LNH, H)):
        assert left.dtype == torch.float32 and left[0].is_contiguous() and left[0, 0].numel() == size
    out_THV = y_TC.new_empty(B * N, H, V)
    padded = 1 if N == 1 else max(16, triton.next_power_of_2(N))
    log2, tiles = padded.bit_length() - 1, tiles or tree_tiles(B, N, H)
    by_halves = steps.max_depth > 2 * log2 - 1  # fewer products than one for each depth
    block_v = min(V, tiles.block_v)
    if B:
        tree_rule_kernel[(H * (V // block_v), B)](
            y_TC, *gates, layer.state_PHKV, layer.k_LNGK, layer.u_LNHV, layer.decay_LNH, steps.read_B, steps.write_B,
            steps.count_B, steps.path_BE, steps.parents_BN, out_THV, y_TC.stride(0), gates.a_TH.stride(0), gates.b_TH.stride(0),
            layer.state_PHKV.stride(0), layer.k_LNGK.stride(0), layer.u_LNHV.stride(0), layer.decay_LNH.stride(0), N=N, E=E,
            G=G, H=H, K=K, V=V, DEPTH=steps.max_depth, CHAIN=steps.is_chain,
            HALVINGS=log2 if by_halves else 0, PRECISION=precision, PADDED_N=padded, GROUP=min(E, GROUP),
            BLOCK_K=min(K, tiles.block_k), BLOCK_V=block_v, num_warps=tiles.warps, **chained(y_TC.device),
        )  # fmt: skip
    return out_THV


def check_rule(y_TC: Tensor, gates: Gates, layer: LayerStates) -> None:
    """Asserts what both kernels of the rule take; widths were checked as the target was loaded."""
    (_, H, K, V), G = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    assert all(width >= 16 and not width & (width - 1) for width in (K, V)), "powers of two from 16 on"
    assert y_TC.shape[1] == 2 * G * K + H * V and y_TC.stride(1) == 1 and layer.state_PHKV[0].is_contiguous()
    assert layer.state_PHKV.dtype == torch.float32 and H % G == 0
    for each in (gates.a_TH, gates.b_TH):
        assert each.shape == (len(y_TC), H) and each.stride(1) == 1
    assert all(each.shape == (H,) and each.is_contiguous() for each in gates[2:])
