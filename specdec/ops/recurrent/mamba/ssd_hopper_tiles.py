"""Which passes over trees the kernels for Hopper GPUs compute, ssd_tree_hopper.py's and ssd_heads_hopper.py's, in which tiles.

The kernels themselves are not imported here, because a Triton without Gluon can't.
"""

from __future__ import annotations

from math import gcd
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

    slices: 0: the state is cut into parts of 16 bits before the wait; else its rows are, after it, in so many steps, for which
    fewer registers do.
    at_once: whether the wait comes before the pending path is added, so that everything is loaded at once.
    items: heads of a group (or halves of heads) that a program computes, by ssd_heads_hopper.py; 0: it computes one, by
    ssd_tree_hopper.py, which alone has slices of 0, and at_once.
    """

    registers: int = 0
    slices: int = 0
    at_once: bool = False
    items: int = 0


def ssd_hopper_tiles(sequences: int, nodes: int, layer: RuleStates) -> SsdHopperTiles:
    """The fastest of those that benchmarks/layers/recurrent.py tries, on an H200."""
    (_, H, _, V), G = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    items = H * V // 64
    if sequences * items <= 2 * 132:  # programs, of which two fit on an SM
        return SsdHopperTiles()
    return SsdHopperTiles(168 if nodes <= 32 else 0, 2, items=gcd(items // G, 4))


def takes(y_TC: Tensor, layer: RuleStates, nodes: int) -> bool:
    """Whether they compute such a pass, on this GPU."""
    K, V = layer.state_PHKV.shape[2:]
    aligned = y_TC.stride(0) % 16 == 0 and y_TC.data_ptr() % 16 == 0
    if not (y_TC.is_cuda and y_TC.dtype == torch.bfloat16 and 1 < nodes <= MOST and K == WIDTH and V % 64 == 0 and aligned):
        return False
    return has_gluon() and match_of(y_TC.device).hopper
