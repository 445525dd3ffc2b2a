"""Launches the kernels of `kimi_delta.tree_outputs`; parts/launch.py those of parts of prompts.

One launch for trees of one node (step_triton.py), two for others (nodes_triton.py, rule_triton.py), but on Hopper GPUs mostly
one (rule_hopper.py).  In Triton's kernels everything is float32: PRECISION.

Shapes: as of specdec/ops/recurrent/kimi_delta.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.kimi.nodes_triton import kimi_nodes_kernel
from specdec.ops.recurrent.kimi.rule_triton import kimi_rule_kernel
from specdec.ops.recurrent.kimi.step_triton import kimi_step_kernel
from specdec.ops.recurrent.kimi_delta import KimiGates
from specdec.ops.recurrent.shared_triton import PRECISION
from specdec.ops.recurrent.states import RuleStates, TreeSteps, lie_whole
from specdec.ops.recurrent.trees.hopper_tiles import takes

# Nodes: an inverse of more by powers takes 256 KiB of shared memory, and by halves 128.
MOST_BY_POWERS = 64


class KimiTiles(NamedTuple):
    """A program's columns of values, the rows of the state that it multiplies at once, its warps; warps of nodes_triton.py.

    group: accepted nodes of the pending path that are read at once.  node_k: channels that nodes_triton.py works on at once.
    """

    block_v: int
    block_k: int = 32
    warps: int = 4
    node_warps: int = 4
    group: int = 2
    node_k: int = 32


class KimiHopperTiles(NamedTuple):
    """Of rule_hopper.py.  warps: 4 or 8, of 16 columns each.  registers: of a thread, at most; 0: what the compiler wants.

    late: the state is read last, when no other numbers need registers.  copied: it lies in shared memory by then, on its way to
    which it is from the beginning.
    """

    warps: int = 8
    registers: int = 0
    late: bool = False
    copied: bool = False


def kimi_tiles(sequences: int, nodes: int, heads: int) -> KimiTiles:
    """Few were tried on an H200, of 1 and 32 sequences with 1, 6 and 32 nodes; those of more nodes were timed by nobody."""
    crowded = sequences * heads > 132  # programs of nodes_triton.py, for as many SMs
    if nodes == 1:
        return KimiTiles(64, warps=4) if crowded else KimiTiles(32, warps=2)
    if nodes <= 8:
        return KimiTiles(64, 64, 4, 4, 3, 64) if crowded else KimiTiles(32, 64, 4, 8, 3, 128)
    if nodes <= 16:
        return KimiTiles(32, 64, 4, 2) if crowded else KimiTiles(32, 64, 4, 4, 2, 64)
    if nodes <= 32:
        return KimiTiles(64, 64, 4, 4) if crowded else KimiTiles(32, 32, 4, 8, 3, 64)
    return KimiTiles(32, 32, 8, 8)


def kimi_hopper_tiles(sequences: int, nodes: int, heads: int) -> KimiHopperTiles:
    """The fastest of those that benchmarks/layers/recurrent.py tries, on an H200.

    32 rows of 32 nodes take 101 us, and 115 if the state is read when it is needed; of those 115, 25 are the substitution.
    """
    is_crowded = sequences * heads > 132  # programs, for as many SMs
    return KimiHopperTiles(8, 128, True, True) if is_crowded and nodes <= 32 else KimiHopperTiles()


def launch_kimi_trees(
    y_TC: Tensor, gates: KimiGates, layer: RuleStates, steps: TreeSteps, precision: str = PRECISION,
    tiles: KimiTiles | KimiHopperTiles | None = None,
) -> Tensor:  # fmt: skip
    """`kimi_delta.tree_outputs`: [T, H, V].  precision: of Triton's products: "tf32x3" or "ieee"."""
    (B, N), E = steps.parents_BN.shape, steps.path_BE.shape[1]
    _, H, K, V = layer.state_PHKV.shape
    check_kimi(y_TC, gates, layer)
    assert lie_whole(steps)
    assert len(y_TC) == B * N and N <= layer.k_LNGK.shape[1]
    for left, width in ((layer.k_LNGK, K), (layer.u_LNHV, V), (layer.decay_LNH, K)):
        assert left.dtype == torch.float32 and left[0].is_contiguous() and left.shape[2:] == (H, width)
    out_THV = y_TC.new_empty(B * N, H, V)
    if not B:
        return out_THV
    if tiles is None:
        is_hopper = precision == PRECISION and takes(y_TC, layer, N)
        tiles = kimi_hopper_tiles(B, N, H) if is_hopper else kimi_tiles(B, N, H)
    if isinstance(tiles, KimiHopperTiles):
        from specdec.ops.recurrent.kimi.rule_hopper import launch_kimi_trees_hopper

        launch_kimi_trees_hopper(y_TC, gates, layer, steps, out_THV, tiles)
        return out_THV
    block_v, group, here = min(V, tiles.block_v), min(E, tiles.group), chained(y_TC.device)
    memory = layer.state_PHKV, layer.k_LNGK, layer.u_LNHV, layer.decay_LNH
    numbers = steps.read_B, steps.write_B, steps.count_B, steps.path_BE
    inputs, strides = (y_TC, *gates), (y_TC.stride(0), gates.a_TC.stride(0), gates.b_TH.stride(0))
    of_memory = tuple(each.stride(0) for each in memory)
    if N == 1:
        kimi_step_kernel[(H * (V // block_v), B)](
            *inputs, *memory, *numbers, out_THV, *strides, *of_memory, E=E, H=H, K=K, V=V, GROUP=group, BLOCK_V=block_v,
            num_warps=tiles.warps, **here,
        )  # fmt: skip
        return out_THV
    P, depth = max(8, triton.next_power_of_2(N)), steps.max_depth
    M, sizes = max(16, P), {"N": N, "H": H, "K": K, "P": P, "PRECISION": precision}
    solved = torch.empty(B, H, 2 * P * P + 2 * P, dtype=torch.float32, device=y_TC.device)
    kimi_nodes_kernel[(H, B)](
        *inputs, layer.k_LNGK, layer.decay_LNH, steps.write_B, steps.parents_BN, solved, *strides, of_memory[1], of_memory[3],
        DEPTH=depth, CHAIN=steps.is_chain, HALVINGS=M.bit_length() - 1 if depth > 7 or M > MOST_BY_POWERS else 0,
        M=M, BLOCK_K=min(K, tiles.node_k), num_warps=tiles.node_warps, **sizes, **here,
    )  # fmt: skip
    kimi_rule_kernel[(H * (V // block_v), B)](
        y_TC, solved, *memory, *numbers, out_THV, strides[0], *of_memory, E=E, V=V, GROUP=group, BLOCK_K=min(K, tiles.block_k),
        BLOCK_V=block_v, num_warps=tiles.warps, **sizes, **here,
    )  # fmt: skip
    return out_THV


def check_kimi(y_TC: Tensor, gates: KimiGates, layer: RuleStates) -> None:
    """Asserts what all kernels of the rule take; widths were checked as the target was loaded."""
    _, H, K, V = layer.state_PHKV.shape
    assert all(width >= 16 and not width & (width - 1) for width in (K, V)), "powers of two from 16 on"
    assert y_TC.shape[1] == 2 * H * K + H * V and y_TC.stride(1) == 1 and layer.state_PHKV[0].is_contiguous()
    assert layer.state_PHKV.dtype == torch.float32
    for each, width in ((gates.a_TC, H * K), (gates.b_TH, H)):
        assert each.shape == (len(y_TC), width) and each.stride(1) == 1
    assert gates.A_log_H.shape == (H,) and gates.dt_bias_C.shape == (H * K,)
    assert gates.A_log_H.is_contiguous() and gates.dt_bias_C.is_contiguous()
