"""The kernels of `gated_delta.tree_outputs`: a program computes some columns of a head's values for a whole tree.

It reads its part of the state once, adds the pending path, and writes it once.  All of that but the writing comes before its
wait: states and what nodes left are a round old.  What nodes have to do with each other comes from nodes_triton.py, which runs
before; trees of one node need none of it (step_triton.py).  No program reads what another one of its launch writes.

Shapes: as of gated_delta.py; P: rows and columns of the nodes' matrices, N or more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.gated_delta import Gates
from specdec.ops.recurrent.shared_triton import PRECISION, multiplied
from specdec.ops.recurrent.states import LayerStates, TreeSteps, lie_whole
from specdec.ops.recurrent.trees.nodes_triton import tree_nodes_kernel
from specdec.ops.recurrent.trees.path_triton import states_with_paths
from specdec.ops.recurrent.trees.step_triton import step_rule_kernel

GROUP = 4  # accepted nodes that are read at once


class RuleTiles(NamedTuple):
    """A program's columns of values, the rows of the state that it multiplies at once, its warps; warps of nodes_triton.py."""

    block_v: int
    block_k: int = 32
    warps: int = 4
    node_warps: int = 4


def tree_tiles(sequences: int, nodes: int, value_heads: int) -> RuleTiles:
    if nodes <= 8:
        return RuleTiles(16, 32, 1, 1)
    return RuleTiles(32, 32, 2, 4)


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
    tiles = states_with_paths(
        to_state_KV + number * stride_state, k_left + number * stride_k + g * K,
        u_left + number * stride_u + h * V + v, decay_left + number * stride_decay + h, path + row * E, accepted,
        G, H, K, V, GROUP, BLOCK_K,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.load(write + row)
    for step in tl.static_range(K // BLOCK_K):
        tl.store(to_state_KV + number * stride_state + step * BLOCK_K * V, tiles[step])
    y, own, u_left = y + row * N * stride_y, solved + (row * H + h) * (2 * P * P + 2 * P), u_left + number * stride_u + h * V
    from_q, from_v, out = y + g * K, y + 2 * G * K + h * V + v, out + (row * N * H + h) * V + v
    if P == 8:
        _few_nodes(
            from_q, from_v, own, tiles, out, u_left + v, stride_y, N, G, H, K, V, PRECISION, P, BLOCK_K, BLOCK_V
        )  # fmt: skip
    else:
        _many_nodes(
            from_q, from_v, own, tiles, out, u_left + v, stride_y, N, G, H, K, V, PRECISION, P, BLOCK_K, BLOCK_V
        )  # fmt: skip


@triton.jit
def _few_nodes(
    from_q, from_v_V, own, tiles, to_out_V, to_u_V, stride_y,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Of up to 8 nodes: queries and keys are one matrix of 16 rows (I), as outputs and u are.  Products take 16 at least."""
    i, k = tl.arange(0, 2 * P), tl.arange(0, BLOCK_K)
    node, is_key, ok_I = i % P, i >= P, i % P < N
    from_x_IK = from_q + (tl.where(is_key, G * K, 0) + node * stride_y)[:, None] + k[None, :]
    x_state_IV = tl.zeros([2 * P, BLOCK_V], tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        x_IK = tl.load(from_x_IK + step * BLOCK_K, mask=ok_I[:, None], other=0.0)
        x_state_IV = multiplied(x_IK, tiles[step], x_state_IV, PRECISION)
    v_IV = tl.load(from_v_V[None, :] + node[:, None] * stride_y, mask=ok_I[:, None], other=0.0).to(tl.float32)
    factor_I, sound_IV = tl.load(own + 2 * P * P + i), tl.abs(v_IV) < float("inf")
    right_IV = tl.where(sound_IV, v_IV, 0.0) - factor_I[:, None] * x_state_IV
    x_IV = tl.where(is_key[:, None], right_IV, x_state_IV)
    x_IV = tl.where(tl.abs(x_IV) < float("inf"), x_IV, 0.0)
    solved_II = tl.load(own + i[:, None] * P + (i - P)[None, :], mask=is_key[None, :] & (i >= 0)[:, None], other=0.0)
    solved_II = tl.where((i[:, None] == i[None, :]) & (i < P)[:, None], factor_I[:, None], solved_II)
    result_IV = tl.dot(solved_II, x_IV, input_precision=PRECISION)
    out_IV = tl.where(sound_IV, result_IV, float("nan")).to(to_out_V.dtype.element_ty)
    to_out_IV, to_u_IV = to_out_V[None, :] + (node * H * V)[:, None], to_u_V[None, :] + (node * H * V)[:, None]
    tl.store(to_out_IV, out_IV, mask=(ok_I & (i < P))[:, None])
    tl.store(to_u_IV, result_IV, mask=(ok_I & is_key)[:, None])


@triton.jit
def _many_nodes(
    from_q, from_v_V, own, tiles, to_out_V, to_u_V, stride_y,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    n, k = tl.arange(0, P), tl.arange(0, BLOCK_K)
    ok_N1 = (n < N)[:, None]
    from_q_NK = from_q + n[:, None] * stride_y + k[None, :]
    q_state, k_state = tl.zeros([P, BLOCK_V], tl.float32), tl.zeros([P, BLOCK_V], tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        k_NK = tl.load(from_q_NK + step * BLOCK_K + G * K, mask=ok_N1, other=0.0)
        q_NK = tl.load(from_q_NK + step * BLOCK_K, mask=ok_N1, other=0.0)
        k_state = multiplied(k_NK, tiles[step], k_state, PRECISION)
        q_state = multiplied(q_NK, tiles[step], q_state, PRECISION)
    v_NV = tl.load(from_v_V[None, :] + n[:, None] * stride_y, mask=ok_N1, other=0.0).to(tl.float32)
    sound_NV = tl.abs(v_NV) < float("inf")
    right_NV = tl.where(sound_NV, v_NV, 0.0) - tl.load(own + 2 * P * P + P + n)[:, None] * k_state
    right_NV = tl.where(tl.abs(right_NV) < float("inf"), right_NV, 0.0)
    from_NN = own + n[:, None] * P + n[None, :]
    u_NV = tl.dot(tl.load(from_NN + P * P), right_NV, input_precision=PRECISION)
    to_NV = (n * H * V)[:, None]
    tl.store(to_u_V[None, :] + to_NV, u_NV, mask=ok_N1)
    faded_NV = tl.load(own + 2 * P * P + n)[:, None] * q_state
    out_NV = tl.dot(tl.load(from_NN), right_NV, faded_NV, input_precision=PRECISION)
    out_NV = tl.where(sound_NV, out_NV, float("nan"))
    tl.store(to_out_V[None, :] + to_NV, out_NV.to(to_out_V.dtype.element_ty), mask=ok_N1)


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
    out_THV, tiles = y_TC.new_empty(B * N, H, V), tiles or tree_tiles(B, N, H)
    if not B:
        return out_THV
    block_v, group, here = min(V, tiles.block_v), min(E, GROUP), chained(y_TC.device)
    memory = layer.state_PHKV, layer.k_LNGK, layer.u_LNHV, layer.decay_LNH
    numbers = steps.read_B, steps.write_B, steps.count_B, steps.path_BE
    inputs, strides = (y_TC, *gates), (y_TC.stride(0), gates.a_TH.stride(0), gates.b_TH.stride(0))
    of_memory = tuple(each.stride(0) for each in memory)
    if N == 1:
        step_rule_kernel[(H * (V // block_v), B)](
            *inputs, *memory, *numbers, out_THV, *strides, *of_memory, E=E, G=G, H=H, K=K, V=V, GROUP=group, BLOCK_V=block_v,
            num_warps=tiles.warps, **here,
        )  # fmt: skip
        return out_THV
    P, depth = max(8, triton.next_power_of_2(N)), steps.max_depth
    M, sizes = max(16, P), {"N": N, "G": G, "H": H, "K": K, "P": P, "PRECISION": precision}
    solved = torch.empty(B, H, 2 * P * P + 2 * P, dtype=torch.float32, device=y_TC.device)
    tree_nodes_kernel[(H, B)](
        *inputs, layer.k_LNGK, layer.decay_LNH, steps.write_B, steps.parents_BN, solved, *strides, of_memory[1], of_memory[3],
        DEPTH=depth, CHAIN=steps.is_chain, SQUARINGS=(depth > 1) + (depth > 3), HALVINGS=M.bit_length() - 1 if depth > 7 else 0,
        M=M, num_warps=tiles.node_warps, **sizes, **here,
    )  # fmt: skip
    tree_rule_kernel[(H * (V // block_v), B)](
        y_TC, solved, *memory, *numbers, out_THV, strides[0], *of_memory, E=E, V=V, GROUP=group, BLOCK_K=min(K, tiles.block_k),
        BLOCK_V=block_v, num_warps=tiles.warps, **sizes, **here,
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
