"""The kernel of `ssd.tree_outputs`: a program computes some columns of a head's values for a whole tree.

It reads its part of the state once, adds the pending path, and writes it once.  All of that but the writing comes before its
wait: states and what nodes left are a round old.  What nodes have to do with each other, A of

    out = exp(D) (q S) + A (dt x) + skip x        A_ij = (q_i . k_j) exp(D_i - D_j) on node i's path

is small, so every program makes it again.  No program reads what another one of its launch writes.  Layers compute trees of one
node otherwise (ssd_step_triton.py), and on Hopper GPUs most trees (ssd_tree_hopper.py).

Shapes: as of ssd.py; M: N, and 16 at least.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.mamba.ssd_hopper_tiles import SsdHopperTiles, ssd_hopper_tiles, takes
from specdec.ops.recurrent.shared_triton import PRECISION, alike, multiplied, softplus, weighted
from specdec.ops.recurrent.ssd import SsdGates
from specdec.ops.recurrent.states import RuleStates, TreeSteps, lie_whole
from specdec.ops.recurrent.trees.nodes_triton import ancestors
from specdec.ops.recurrent.trees.path_triton import add_path, add_rest, faded, read_path, read_state


class SsdTiles(NamedTuple):
    """A program's columns of values, the rows of the state that it multiplies at once, and its warps.

    group: accepted nodes of the pending path that are read at once.
    """

    block_v: int
    block_k: int = 64
    warps: int = 4
    group: int = 3


def ssd_tiles(sequences: int, nodes: int, heads: int, key_width: int) -> SsdTiles:
    """The fastest of about eight each that were tried on an H200 at Nemotron-3-Nano's widths; more than 32 nodes: untried.

    Microseconds of 32 rows, and what their bytes take: 1 node 41 (31), 6 nodes 77 (32), 32 nodes 135 (40).
    """
    crowded = sequences * heads > 264  # twice as many as SMs of an H200
    if nodes <= 16:
        tiles = SsdTiles(32, 128, 2) if crowded else SsdTiles(32, 64, 4)
    else:
        tiles = SsdTiles(64, 64, 4 if crowded else 8) if nodes <= 32 else SsdTiles(64, 32, 8)
    # So that a thread has registers for its part of the state.
    return tiles._replace(warps=min(8, max(1, tiles.warps * key_width // 128)))


@triton.jit
def ssd_tree_kernel(
    y, dt,  # [B * N, 2 G K + H V], [B * N, H]
    A_log, dt_bias, D,  # [H]
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., G, K], [L, .., H, V], [L, .., H]
    read, write, count,  # [B]
    path,  # [B, E]
    parents,  # [B, N]
    out,  # [B * N, H, V]
    stride_y, stride_dt, stride_state, stride_k, stride_u, stride_decay,
    N: tl.constexpr, E: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DEPTH: tl.constexpr, CHAIN: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, h, block = tl.program_id(1).to(tl.int64), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    g, v, m = h // (H // G), block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, M)
    number, accepted = tl.load(read + row, cache_modifier=".cg"), tl.load(count + row, cache_modifier=".cg")
    to_state_KV = state + h * K * V + tl.arange(0, BLOCK_K)[:, None] * V + v[None, :]
    from_k, from_decay = k_left + number * stride_k + g * K, decay_left + number * stride_decay + h
    from_u_V, path = u_left + number * stride_u + h * V + v, path + row * E
    raw = read_state(to_state_KV + number * stride_state, K, V, BLOCK_K)
    decays, added, keys, last = read_path(from_k, from_u_V, from_decay, path, 0, accepted, G, H, K, V, GROUP, BLOCK_K)
    mask_MM = ancestors(parents + row * N, N, DEPTH, CHAIN, M)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number, at_M, ok_M1 = tl.load(write + row), row * N + m, (m < N)[:, None]
    from_q_MK = y + g * K + at_M[:, None] * stride_y + tl.arange(0, BLOCK_K)[None, :]
    x_MV = tl.load(y + 2 * G * K + h * V + at_M[:, None] * stride_y + v[None, :], mask=ok_M1, other=0.0)
    dt_M = tl.load(dt + at_M * stride_dt + h, mask=m < N, other=0.0).to(tl.float32)
    step_M, rate = softplus(dt_M + tl.load(dt_bias + h).to(tl.float32)), tl.exp(tl.load(A_log + h).to(tl.float32))
    skip = tl.load(D + h).to(tl.float32)
    queries, broken_M, qk_MM = (), tl.zeros([M], tl.float32), tl.zeros([M, M], tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        q_MK = tl.load(from_q_MK + step * BLOCK_K, mask=ok_M1, other=0.0)
        k_MK = tl.load(from_q_MK + G * K + step * BLOCK_K, mask=ok_M1, other=0.0)
        broken_M += _broken(q_MK) + _broken(k_MK)
        qk_MM, queries = alike(q_MK, k_MK, qk_MM, PRECISION), queries + (q_MK,)  # type: ignore[assignment]
    # Numbers of a node that are not finite may reach those below it alone: `rule.without_broken`.
    sound_M = (broken_M == 0.0) & (tl.abs(rate * step_M) < float("inf"))
    step_M = tl.where(sound_M, step_M, 0.0)
    summed_M = -tl.sum(tl.where(mask_MM, (rate * step_M)[None, :], 0.0), 1)
    u_MV = step_M[:, None] * x_MV.to(tl.float32)
    sound_MV = sound_M[:, None] & (tl.abs(u_MV) < float("inf"))
    x_MV, u_MV = tl.where(sound_MV, x_MV, 0.0), tl.where(sound_MV, u_MV, 0.0)
    # Of nodes on different branches the difference may be large: it never meets exp.
    fade_MM = tl.exp(tl.where(mask_MM, summed_M[:, None] - summed_M[None, :], float("-inf")))
    reads_MM = tl.where(mask_MM & sound_M[None, :], qk_MM * fade_MM * step_M[None, :], 0.0)
    tiles = add_path(faded(raw, last, K // BLOCK_K), decays, added, keys, last, K // BLOCK_K, GROUP)
    if E > GROUP:
        tiles = add_rest(tiles, from_k, from_u_V, from_decay, path, accepted, G, H, K, V, GROUP, BLOCK_K)
    out_MV = tl.zeros([M, BLOCK_V], tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        tl.store(to_state_KV + number * stride_state + step * BLOCK_K * V, tiles[step])
        out_MV = multiplied(queries[step], tiles[step], out_MV, PRECISION)
    out_MV = out_MV * tl.exp(summed_M)[:, None] + skip * x_MV.to(tl.float32)
    out_MV = tl.where(sound_MV, weighted(reads_MM, x_MV, out_MV, PRECISION), float("nan"))
    to_MV = (m * H * V + h * V)[:, None] + v[None, :]
    tl.store(out + row * N * H * V + to_MV, out_MV.to(out.dtype.element_ty), mask=ok_M1)
    tl.store(u_left + number * stride_u + to_MV, u_MV, mask=ok_M1)
    tl.store(decay_left + number * stride_decay + m * H + h, summed_M, mask=(m < N) & (block == 0))
    if (block == 0) & (h % (H // G) == 0):
        to_k_MK = k_left + number * stride_k + (m * G + g)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
        for step in tl.static_range(K // BLOCK_K):
            k_MK = tl.load(from_q_MK + G * K + step * BLOCK_K, mask=ok_M1, other=0.0)
            tl.store(to_k_MK + step * BLOCK_K, k_MK.to(tl.float32), mask=ok_M1)


@triton.jit
def _broken(x_MK):
    """How many numbers of each row are not finite."""
    return tl.sum(tl.where(tl.abs(x_MK.to(tl.float32)) < float("inf"), 0.0, 1.0), 1)


def launch_ssd_tree(
    y_TC: Tensor, gates: SsdGates, layer: RuleStates, steps: TreeSteps, precision: str = PRECISION,
    tiles: SsdTiles | SsdHopperTiles | None = None,
) -> Tensor:  # fmt: skip
    """`ssd.tree_outputs`: [T, H, V].  precision: of this file's products: "tf32x3" or "ieee"."""
    (B, N), E = steps.parents_BN.shape, steps.path_BE.shape[1]
    (_, H, K, V), G = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    check_ssd_tree(y_TC, gates, layer, steps)
    out_THV = y_TC.new_empty(B * N, H, V)
    if tiles is None:
        is_hopper = precision == PRECISION and takes(y_TC, layer, N)
        tiles = ssd_hopper_tiles(B, N, H, V) if is_hopper else ssd_tiles(B, N, H, K)
    if not B:
        return out_THV
    if isinstance(tiles, SsdHopperTiles):
        from specdec.ops.recurrent.mamba.ssd_tree_hopper import launch_ssd_tree_hopper

        launch_ssd_tree_hopper(y_TC, gates, layer, steps, out_THV, tiles)
        return out_THV
    block_v, memory = min(V, tiles.block_v), (layer.state_PHKV, layer.k_LNGK, layer.u_LNHV, layer.decay_LNH)
    inputs = (y_TC, *gates, *memory, steps.read_B, steps.write_B, steps.count_B, steps.path_BE)
    strides = y_TC.stride(0), gates.dt_TH.stride(0), *(each.stride(0) for each in memory)
    ssd_tree_kernel[(H * (V // block_v), B)](
        *inputs, steps.parents_BN, out_THV, *strides, N=N, E=E, G=G, H=H, K=K, V=V, DEPTH=steps.max_depth, CHAIN=steps.is_chain,
        PRECISION=precision, M=max(16, triton.next_power_of_2(N)), GROUP=min(E, tiles.group), BLOCK_K=min(K, tiles.block_k),
        BLOCK_V=block_v, num_warps=tiles.warps, **chained(y_TC.device),
    )  # fmt: skip
    return out_THV


def check_ssd(y_TC: Tensor, gates: SsdGates, layer: RuleStates) -> None:
    """Asserts what all kernels of the rule take; widths were checked as the target was loaded."""
    (_, H, K, V), G = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    assert all(width >= 16 and not width & (width - 1) for width in (K, V)), "powers of two from 16 on"
    assert y_TC.shape[1] == 2 * G * K + H * V and y_TC.stride(1) == 1 and layer.state_PHKV[0].is_contiguous()
    assert layer.state_PHKV.dtype == torch.float32 and H % G == 0
    assert gates.dt_TH.shape == (len(y_TC), H) and gates.dt_TH.stride(1) == 1
    assert all(each.shape == (H,) and each.is_contiguous() for each in gates[1:])


def check_ssd_tree(y_TC: Tensor, gates: SsdGates, layer: RuleStates, steps: TreeSteps) -> None:
    """Asserts what kernels over trees take, too."""
    (B, N), (_, H, K, V), G = steps.parents_BN.shape, layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    check_ssd(y_TC, gates, layer)
    assert lie_whole(steps)
    assert len(y_TC) == B * N and N <= layer.k_LNGK.shape[1]
    for left, size in ((layer.k_LNGK, G * K), (layer.u_LNHV, H * V), (layer.decay_LNH, H)):
        assert left.dtype == torch.float32 and left[0].is_contiguous() and left[0, 0].numel() == size
