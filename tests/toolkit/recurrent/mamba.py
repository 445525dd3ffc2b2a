"""Mamba-2's rule in the middle of texts: as of rounds.py, without a convolution in front.  For tests of its kernels."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.recurrent.ssd import SsdGates, tree_outputs
from specdec.ops.recurrent.states import LayerStates, TreeSteps
from toolkit.recurrent.made import Sizes, path_to, poisoned, random_tree, steps_of
from toolkit.recurrent.rounds import NUMBERS, OWN, ROWS


class SsdWeights(NamedTuple):
    """Each of H numbers."""

    A_log: Tensor
    dt_bias: Tensor
    D: Tensor

    @classmethod
    def random(cls, heads: int) -> SsdWeights:
        """Log-decays go down to about -20."""
        return cls(torch.rand(heads).mul(3).clamp(max=2.9), torch.rand(heads), torch.randn(heads))

    def gates(self, dt_TH: Tensor) -> SsdGates:
        return SsdGates(dt_TH, *self)


class SsdRound(NamedTuple):
    """A pass over trees that is about to run, on a CPU.  y_TC, dt_TH: what the convolution and the projection gave."""

    weights: SsdWeights
    layer: LayerStates
    steps: TreeSteps
    y_TC: Tensor
    dt_TH: Tensor


def ssd_round(sizes: Sizes, nodes: int, chain: bool, dtype: torch.dtype, seed: int, before: int = 6) -> SsdRound:
    """before: nodes of the trees before, some of whose paths are pending."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    weights, layer = SsdWeights.random(sizes.H), poisoned(sizes, NUMBERS, OWN, max(nodes, before), dtype)
    for number in (2, 4, 9):
        layer.rule.state_PHKV[number] = torch.randn(sizes.H, sizes.K, sizes.V)
    trees = [random_tree(before, rng, row == 0) for row in range(2)]
    y_TC, dt_TH = ssd_inputs(sizes, 2 * before, dtype)
    tree_outputs(y_TC, weights.gates(dt_TH), layer.rule, steps_of(trees, [(9, 2), (9, 4)], [[], []], before))
    paths = [[], path_to(trees[0], before - 1), path_to(trees[1], rng.randrange(before)), [], []]
    steps = steps_of([random_tree(nodes, rng, chain) for _ in ROWS], list(ROWS), paths, before)
    return SsdRound(weights, layer, steps, *ssd_inputs(sizes, len(ROWS) * nodes, dtype))


def ssd_inputs(sizes: Sizes, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries, keys and values, and steps, one of which fades a state by e^-90 and more.  Queries and keys have length 1."""
    y, dt = torch.randn(tokens, sizes.C), torch.randn(tokens, sizes.H).mul(2)
    y[:, : 2 * sizes.G * sizes.K] /= sizes.K**0.5
    dt[tokens // 2] += 90
    return y.to(dtype), dt.to(dtype)
