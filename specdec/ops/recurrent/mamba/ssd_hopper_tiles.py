"""Which passes over trees ssd_tree_hopper.py's kernel computes, and in which tiles.

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


class SsdHopperTiles(NamedTuple):
    """registers: of a thread, at most; 0: as many as the compiler wants.

    copied: whether the state goes to shared memory while nodes are worked on, and comes last.
    """

    registers: int = 0
    copied: bool = False


def ssd_hopper_tiles(sequences: int, nodes: int, heads: int, width: int) -> SsdHopperTiles:
    """The fastest of those that benchmarks/layers/recurrent.py tries, on an H200.  width: of values.

    Microseconds at Nemotron-3-Nano's widths, and what their bytes take: 1 row of 6 nodes 3.5 (1.1), of 32 4.7 (1.4), 8 rows of
    32 nodes 17 (11), 32 rows of 6 nodes 43 (34), of 32 57 (45), of 60 77 (58).  With states in registers from the beginning
    the last three take 46, 57 and 82.  To move 32 rows' states alone takes 36, by torch's copy 34.
    """
    if sequences * heads * width // 64 <= 4 * 132:  # programs: about as many as an H200 runs in two turns
        return SsdHopperTiles()
    return SsdHopperTiles(128 if nodes <= 16 else 168, True)


def takes(y_TC: Tensor, layer: RuleStates, nodes: int) -> bool:
    """Whether the kernel computes such a pass, on this GPU."""
    K, V = layer.state_PHKV.shape[2:]
    aligned = y_TC.stride(0) % 16 == 0 and y_TC.data_ptr() % 16 == 0
    if not (y_TC.is_cuda and y_TC.dtype == torch.bfloat16 and 1 < nodes <= MOST and K == WIDTH and V % 64 == 0 and aligned):
        return False
    return has_gluon() and match_of(y_TC.device).hopper
