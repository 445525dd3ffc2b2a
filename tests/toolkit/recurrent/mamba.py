"""Mamba-2's rule in the middle of texts: as of rounds.py, without a convolution in front.  For tests of its kernels."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.recurrent.mamba.ssd_hopper_tiles import SsdHopperTiles
from specdec.ops.recurrent.mamba.ssd_tree_triton import SsdTiles, launch_ssd_tree
from specdec.ops.recurrent.ssd import SsdGates, tree_outputs
from specdec.ops.recurrent.states import LayerStates, TreeSteps
from toolkit.kernels import DEVICE
from toolkit.recurrent.made import Sizes, path_to, poisoned, random_tree, steps_of
from toolkit.recurrent.rounds import NUMBERS, OWN, ROWS, copied, equal_memory, moved


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


def on_device(gates: SsdGates) -> SsdGates:
    return SsdGates(*(each.to(DEVICE) for each in gates))


def broken_in(now: SsdRound, sizes: Sizes, broken: str, node: int) -> None:
    """Makes a "query", "key", "value" or "step" of one node of each tree something that is not finite."""
    columns = {"query": 1, "key": sizes.G * sizes.K + 1, "value": 2 * sizes.G * sizes.K + 1}
    rows, nodes = now.steps.parents_BN.shape
    for row in range(rows):
        if broken == "step":
            now.dt_TH[nodes * row + node, 0] = torch.nan
        else:
            now.y_TC[nodes * row + node, columns[broken]] = torch.inf if row % 2 else torch.nan


def check_trees(now: SsdRound, tolerance: float, tiles: SsdTiles | SsdHopperTiles | None = None) -> Tensor:
    """What the definition gives, after the kernel gave the same and left the same memory."""
    gates, layer = now.weights.gates(now.dt_TH), copied(now.layer, DEVICE)
    got = launch_ssd_tree(now.y_TC.to(DEVICE), on_device(gates), layer.rule, moved(now.steps, DEVICE), tiles=tiles).cpu()
    want = tree_outputs(now.y_TC, gates, now.layer.rule, now.steps)
    scale = want[want.isfinite()].abs().max()
    torch.testing.assert_close(got, want, atol=float(tolerance * scale), rtol=tolerance, equal_nan=True)
    equal_memory(layer, now.layer, 2e-5)
    return want
