"""Which passes over trees rule_hopper.py's kernel computes, and in which tiles.

It runs on Hopper GPUs.  The kernel itself is not imported here, because a Triton without Gluon can't.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import has_gluon
from specdec.ops.products.gpus import match_of
from specdec.ops.recurrent.states import RuleStates

MOST = 64  # nodes, the bits of a word
WIDTH = 128  # of keys


class HopperTiles(NamedTuple):
    """warps: 4 or 8, of 16 columns each.  registers: of a thread, at most; 0: as many as the compiler wants.

    slices: 0: the state is cut into parts of 16 bits before the wait; else its rows are, after it, in so many steps, for which
    fewer registers do.  turns: how many nodes are solved before all later ones are told of them.
    copied: with slices: whether the state goes to shared memory while nodes are worked on, and is read last.
    """

    warps: int = 4
    registers: int = 0
    slices: int = 0
    turns: int = 1
    copied: bool = False


def hopper_tiles(sequences: int, nodes: int, value_heads: int, width: int) -> HopperTiles:
    """The fastest of those that benchmarks/layers/recurrent.py tries, on an H200.  width: of values.

    32 rows of 6 nodes take 70 us, and 78 with states in registers from the beginning; of 32 nodes 105 and 113.
    """
    if nodes > 32:
        return HopperTiles(8, slices=1)
    if sequences * value_heads * width // 64 <= 2 * 132:  # programs, of which two fit on an SM
        return HopperTiles()
    return HopperTiles(4 if nodes <= 16 else 8, 128, 2, 4, True)


def takes(y_TC: Tensor, layer: RuleStates, nodes: int) -> bool:
    """Whether the kernel computes such a pass, on this GPU."""
    K, V = layer.state_PHKV.shape[2:]
    aligned = y_TC.stride(0) % 8 == 0 and y_TC.data_ptr() % 16 == 0
    if not (y_TC.is_cuda and y_TC.dtype == torch.bfloat16 and 1 < nodes <= MOST and K == WIDTH and V % 128 == 0 and aligned):
        return False
    return has_gluon() and match_of(y_TC.device).hopper
