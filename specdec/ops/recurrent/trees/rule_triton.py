"""The kernels of `gated_delta.tree_outputs`: a program computes some columns of a head's values for a whole tree.

It reads its part of the state once, adds the pending path, and writes it once.  All of that but the writing comes before its
wait: states and what nodes left are a round old.  What nodes have to do with each other comes from nodes_triton.py, which runs
before; trees of one node need none of it (step_triton.py).  No program reads what another one of its launch writes.  On Hopper
GPUs most passes are computed by one kernel instead: rule_hopper.py.

Shapes: as of gated_delta.py; P: rows and columns of the nodes' matrices, N or more.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.gated_delta import Gates
from specdec.ops.recurrent.shared_triton import PRECISION, multiplied
from specdec.ops.recurrent.states import RuleStates, TreeSteps, lie_whole
from specdec.ops.recurrent.trees.hopper_tiles import HopperTiles, hopper_tiles, takes
from specdec.ops.recurrent.trees.nodes_triton import tree_nodes_kernel
from specdec.ops.recurrent.trees.path_triton import add_path, add_rest, faded, read_path, read_state
from specdec.ops.recurrent.trees.step_triton import step_rule_kernel


class RuleTiles(NamedTuple):
    """A program's columns of values, the rows of the state that it multiplies at once, its warps; warps of nodes_triton.py.

    group: accepted nodes of the pending path that are read at once.
    """

    block_v: int
    block_k: int = 32
    warps: int = 4
    node_warps: int = 4
    group: int = 2


def tree_tiles(sequences: int, nodes: int, value_heads: int) -> RuleTiles:
    """The fastest of those that benchmarks/layers/recurrent.py tries, on an H200."""
    crowded = sequences * value_heads > 132  # programs of nodes_triton.py, for as many SMs
    if nodes == 1:
        return RuleTiles(64, warps=2)
    if nodes <= 8:
        return RuleTiles(16, 64, 1, 1, 3) if crowded else RuleTiles(64, 64, 4, 2, 3)
    if nodes <= 16:
        return RuleTiles(32, 32, 2, 2)
    if nodes <= 32:
        return RuleTiles(32, 128, 4, 2) if crowded else RuleTiles(32, 128, 4, 4, 3)
    return RuleTiles(32, 32, 8, 8)


@triton.jit
def tree_rule_kernel(
    y,  # [B * N, 2 G K + H V]
    solved,  # [B, H, 2 P P + 2 P]: see nodes_triton.py
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., G, K], [L, .., H, V], [L, .., H]
    read, write, count,  # [B]
    path,  # [B, E]
    out,  # [B * N, H, V]
    stride_y, stride_state, stride_k, stride_u, stride_decay,
    N: tl.constexpr, E: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    PRECISION: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, h, block = tl.program_id(1).to(tl.int64), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    g, v = h // (H // G), block * BLOCK_V + tl.arange(0, BLOCK_V)
    number, accepted = tl.load(read + row, cache_modifier=".cg"), tl.load(count + row, cache_modifier=".cg")
    to_state_KV = state + h * K * V + tl.arange(0, BLOCK_K)[:, None] * V + v[None, :]
    from_k, from_decay = k_left + number * stride_k + g * K, decay_left + number * stride_decay + h
    from_u_V, path = u_left + number * stride_u + h * V + v, path + row * E
    raw = read_state(to_state_KV + number * stride_state, K, V, BLOCK_K)
    decays, added, keys, last = read_path(from_k, from_u_V, from_decay, path, 0, accepted, G, H, K, V, GROUP, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.load(write + row)
    y, own = y + row * N * stride_y, solved + (row * H + h) * (2 * P * P + 2 * P)
    # Queries and keys are one matrix of 2 P rows (I), and so are outputs and u: products take 16 rows at least.
    i, k = tl.arange(0, 2 * P), tl.arange(0, BLOCK_K)
    node, is_key = i % P, i >= P
    ok_I1, n = (node < N)[:, None], tl.arange(0, P)
    from_IK = y + g * K + (node * stride_y + tl.where(is_key, G * K, 0))[:, None] + k[None, :]
    from_v_NV, ok_N1 = y + 2 * G * K + h * V + n[:, None] * stride_y + v[None, :], (n < N)[:, None]
    v_NV, f_N = tl.load(from_v_NV, mask=ok_N1, other=0.0), tl.load(own + 2 * P * P + n)
    r_N = tl.load(own + 2 * P * P + P + n)
    tiles = add_path(faded(raw, last, K // BLOCK_K), decays, added, keys, last, K // BLOCK_K, GROUP)
    if E > GROUP:
        tiles = add_rest(tiles, from_k, from_u_V, from_decay, path, accepted, G, H, K, V, GROUP, BLOCK_K)
    for step in tl.static_range(K // BLOCK_K):
        tl.store(to_state_KV + number * stride_state + step * BLOCK_K * V, tiles[step])
    products_IV = tl.zeros([2 * P, BLOCK_V], tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        block_IK = tl.load(from_IK + step * BLOCK_K, mask=ok_I1, other=0.0)
        products_IV = multiplied(block_IK, tiles[step], products_IV, PRECISION)
    out_NV, u_NV = _solved(nodes_matrices(own, P), products_IV, v_NV.to(tl.float32), f_N, r_N, P, PRECISION)
    to_NV = (n * H * V + h * V)[:, None] + v[None, :]
    tl.store(out + row * N * H * V + to_NV, out_NV.to(out.dtype.element_ty), mask=ok_N1)
    tl.store(u_left + number * stride_u + to_NV, u_NV, mask=ok_N1)


@triton.jit
def nodes_matrices(own, P: tl.constexpr):
    """A above T [2 P, P]; of 8 nodes with zeros in front, because a product adds up 16 terms at least."""
    i, n = tl.arange(0, 2 * P), tl.arange(0, P)
    if P == 8:
        at_II, ok_II = i[:, None] * P + (i - P)[None, :], (i >= P)[None, :] & (i >= 0)[:, None]
        solved_IJ = tl.load(own + at_II, mask=ok_II, other=0.0)
    else:
        solved_IJ = tl.load(own + i[:, None] * P + n[None, :])
    return solved_IJ


@triton.jit
def _solved(solved_IJ, products_IV, v_NV, f_N, r_N, P: tl.constexpr, PRECISION: tl.constexpr):
    """(outputs, u): see nodes_triton.py.  What is not finite is NaN in its own output, and reaches nobody else."""
    V: tl.constexpr = products_IV.shape[1]
    sound_NV = tl.abs(v_NV) < float("inf")
    q_state_NV, k_state_NV = tl.split(tl.permute(tl.reshape(products_IV, [2, P, V]), (1, 2, 0)))
    right_NV = tl.where(sound_NV, v_NV, 0.0) - r_N[:, None] * k_state_NV
    right_NV = tl.where(tl.abs(right_NV) < float("inf"), right_NV, 0.0)
    if P == 8:
        right_NV = tl.reshape(tl.permute(tl.join(tl.zeros_like(right_NV), right_NV), (2, 0, 1)), [2 * P, V])
    result_IV = tl.dot(solved_IJ, right_NV, input_precision=PRECISION)
    out_NV, u_NV = tl.split(tl.permute(tl.reshape(result_IV, [2, P, V]), (1, 2, 0)))
    return tl.where(sound_NV, out_NV + f_N[:, None] * q_state_NV, float("nan")), u_NV


def launch_tree_rule(
    y_TC: Tensor, gates: Gates, layer: RuleStates, steps: TreeSteps, precision: str = PRECISION,
    tiles: RuleTiles | HopperTiles | None = None,
) -> Tensor:  # fmt: skip
    """`gated_delta.tree_outputs`: [T, H, V].  precision: of rule_triton.py's products: "tf32x3" or "ieee"."""
    (B, N), E = steps.parents_BN.shape, steps.path_BE.shape[1]
    (_, H, K, V), G = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    check_rule(y_TC, gates, layer)
    assert lie_whole(steps)
    assert len(y_TC) == B * N and N <= layer.k_LNGK.shape[1]
    for left, size in ((layer.k_LNGK, G * K), (layer.u_LNHV, H * V), (layer.decay_LNH, H)):
        assert left.dtype == torch.float32 and left[0].is_contiguous() and left[0, 0].numel() == size
    out_THV = y_TC.new_empty(B * N, H, V)
    if tiles is None:
        is_hopper = precision == PRECISION and takes(y_TC, layer, N)
        tiles = hopper_tiles(B, N, H, V) if is_hopper else tree_tiles(B, N, H)
    if not B:
        return out_THV
    if isinstance(tiles, HopperTiles):
        from specdec.ops.recurrent.trees.rule_hopper import launch_tree_rule_hopper

        launch_tree_rule_hopper(y_TC, gates, layer, steps, out_THV, tiles)
        return out_THV
    # Blocks divide widths, which need not be powers of two.
    block_k, block_v = gcd(K, tiles.block_k), gcd(V, tiles.block_v)
    group, here = min(E, tiles.group), chained(y_TC.device)
    memory = layer.state_PHKV, layer.k_LNGK, layer.u_LNHV, layer.decay_LNH
    numbers = steps.read_B, steps.write_B, steps.count_B, steps.path_BE
    inputs, strides = (y_TC, *gates.tensors), (y_TC.stride(0), gates.a_TH.stride(0), gates.b_TH.stride(0))
    of_memory = tuple(each.stride(0) for each in memory)
    if N == 1:
        step_rule_kernel[(H * (V // block_v), B)](
            *inputs, *memory, *numbers, out_THV, *strides, *of_memory, E=E, G=G, H=H, K=K, V=V, GROUP=group, BLOCK_K=K & -K,
            BLOCK_V=block_v, MOST=gates.most, num_warps=tiles.warps, **here,
        )  # fmt: skip
        return out_THV
    P, depth = max(8, triton.next_power_of_2(N)), steps.max_depth
    M, sizes = max(16, P), {"N": N, "G": G, "H": H, "K": K, "P": P, "PRECISION": precision}
    solved = torch.empty(B, H, 2 * P * P + 2 * P, dtype=torch.float32, device=y_TC.device)
    tree_nodes_kernel[(H, B)](
        *inputs, layer.k_LNGK, layer.decay_LNH, steps.write_B, steps.parents_BN, solved, *strides, of_memory[1], of_memory[3],
        DEPTH=depth, CHAIN=steps.is_chain, HALVINGS=M.bit_length() - 1 if depth > 7 else 0,
        M=M, MOST=gates.most, BLOCK_K=K & -K, num_warps=tiles.node_warps, **sizes, **here,
    )  # fmt: skip
    tree_rule_kernel[(H * (V // block_v), B)](
        y_TC, solved, *memory, *numbers, out_THV, strides[0], *of_memory, E=E, V=V, GROUP=group, BLOCK_K=block_k,
        BLOCK_V=block_v, num_warps=tiles.warps, **sizes, **here,
    )  # fmt: skip
    return out_THV


def check_rule(y_TC: Tensor, gates: Gates, layer: RuleStates) -> None:
    """Asserts what both kernels of the rule take; widths were checked as the target was loaded."""
    (_, H, K, V), G = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    assert all(width > 0 and width % 16 == 0 for width in (K, V)), "multiples of 16"
    assert y_TC.shape[1] == 2 * G * K + H * V and y_TC.stride(1) == 1 and layer.state_PHKV[0].is_contiguous()
    assert layer.state_PHKV.dtype == torch.float32 and H % G == 0
    for each in (gates.a_TH, gates.b_TH):
        assert each.shape == (len(y_TC), H) and each.stride(1) == 1
    assert all(each.shape == (H,) and each.is_contiguous() for each in gates.tensors[2:])
