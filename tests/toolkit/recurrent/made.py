"""Random layers, trees and texts for tests of recurrent layers, and the rule itself, one token after the other."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.limits import TRASH
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.gated_delta import Gates
from specdec.ops.recurrent.states import ConvStates, LayerStates, RuleStates, TreeSteps


class Sizes(NamedTuple):
    """Key heads, value heads, their widths, and taps of the convolution."""

    G: int = 2
    H: int = 4
    K: int = 8
    V: int = 6
    Z: int = 4

    @property
    def C(self) -> int:
        return 2 * self.G * self.K + self.H * self.V


class Weights(NamedTuple):
    conv_ZC: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    most: float = 1.0

    @classmethod
    def random(cls, sizes: Sizes, dtype: torch.dtype, most: float = 1.0) -> Weights:
        """Log-decays go down to about -20.  most: of a token's strength."""
        wide = torch.promote_types(dtype, torch.float32)
        A_log = torch.rand(sizes.H, dtype=wide).mul(3).clamp(max=2.9)
        return cls(torch.randn(sizes.Z, sizes.C).to(dtype), A_log, torch.rand(sizes.H, dtype=wide), most)

    @property
    def conv(self) -> Convolution:
        return Convolution(self.conv_ZC)

    def gates(self, a_TH: Tensor, b_TH: Tensor) -> Gates:
        return Gates(a_TH, b_TH, self.A_log_H, self.dt_bias_H, self.most)


def poisoned(sizes: Sizes, numbers: int, own: int, nodes: int, dtype: torch.dtype, device: str = "cpu") -> LayerStates:
    """A layer's memory full of NaN, but for the state before any text.  own: numbers that may hold nodes."""
    wide = torch.promote_types(dtype, torch.float32)

    def full(*shape: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    G, H, K, V, Z = sizes
    conv = ConvStates(full(numbers, Z - 1, sizes.C, dtype=dtype), full(own, nodes, sizes.C, dtype=dtype))
    rule = RuleStates(full(numbers, H, K, V), full(own, nodes, G, K), full(own, nodes, H, V), full(own, nodes, H))
    conv.conv_PWC[0] = rule.state_PHKV[0] = 0
    return LayerStates(conv, rule)


def random_tree(nodes: int, rng: random.Random, chain: bool = False) -> list[int]:
    """Parents; the root is its own."""
    return [0] + [node - 1 if chain else rng.randrange(node) for node in range(1, nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to this one."""
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def turn_numbers(steps: TreeSteps, after: TreeSteps, rng: random.Random) -> None:
    """Makes a pass of the one after it, in place: it reads what was written, with a path of each tree pending, and runs others.

    after: that runs the other trees.
    """
    paths = [path_to(tree, rng.randrange(len(tree)))[: steps.path_BE.shape[1]] for tree in steps.parents_BN.tolist()]
    for row, path in enumerate(paths):
        steps.path_BE[row, : len(path)] = torch.tensor(path, device=steps.path_BE.device)
        steps.count_B[row] = rng.randrange(len(path) + 1)
    for numbers_B in (steps.read_B, steps.write_B):
        numbers_B.copy_(torch.where(numbers_B % 2 == 0, numbers_B + 1, numbers_B - 1))
    steps.parents_BN.copy_(after.parents_BN)


def steps_of(
    trees: list[list[int]], numbers: list[tuple[int, int]], paths: list[list[int]], places: int, device: str = "cpu"
) -> TreeSteps:
    """numbers: those each sequence reads and writes.  paths: what is pending of each."""
    depth = max(len(path_to(tree, node)) for tree in trees for node in range(len(tree))) - 1
    read_B, write_B = torch.tensor(list(zip(*numbers)), device=device)
    padded = [path + [0] * (places - len(path)) for path in paths]
    is_chain = all(tree == [max(0, node - 1) for node in range(len(tree))] for tree in trees)
    return TreeSteps(
        read_B, write_B, torch.tensor(trees, device=device), depth, is_chain, torch.tensor(padded, device=device),
        torch.tensor([len(path) for path in paths], dtype=torch.int32, device=device),
    )  # fmt: skip


class Known(NamedTuple):
    """What the rule keeps of a text: its last inputs, and its state."""

    x_YC: Tensor
    state_HKV: Tensor


def nothing(sizes: Sizes) -> Known:
    """Before any text, in the widest type."""
    zeros = torch.zeros(sizes.H, sizes.K, sizes.V, dtype=torch.float64)
    return Known(torch.zeros(sizes.Z - 1, sizes.C, dtype=torch.float64), zeros)


def by_the_rule(
    x_MC: Tensor, a_MH: Tensor, b_MH: Tensor, weights: Weights, sizes: Sizes, before: Known | None = None
) -> tuple[Tensor, Tensor]:
    """(outputs [M, H, V], the state after each token [M, H, K, V]) of one text, token by token, from where another one ends."""
    G, H, K, V, Z = sizes
    dtype = torch.promote_types(x_MC.dtype, torch.float32)
    x_YC, state = (each.to(dtype, copy=True) for each in before or nothing(sizes))
    outputs, states = [], []
    known = torch.cat((x_YC, x_MC.to(dtype)))
    for m in range(len(x_MC)):
        y = F.silu((known[m : m + Z] * weights.conv_ZC.to(dtype)).sum(0))
        q, k, v = y[: G * K].view(G, K), y[G * K : 2 * G * K].view(G, K), y[2 * G * K :].view(H, V)
        for h in range(H):
            q_K, k_K = (x[h // (H // G)] / (x[h // (H // G)].square().sum() + 1e-6).sqrt() for x in (q, k))
            g = -weights.A_log_H[h].exp() * F.softplus(a_MH[m, h].to(dtype) + weights.dt_bias_H[h])
            faded = g.exp() * state[h]
            state[h] = faded + k_K[:, None] * (weights.most * b_MH[m, h].to(dtype).sigmoid() * (v[h] - k_K @ faded))
            outputs.append(q_K * K**-0.5 @ state[h])
        states.append(state.clone())
    return torch.stack(outputs).view(len(x_MC), H, V), torch.stack(states)


def trash_steps(parts: int) -> tuple[Tensor, Tensor]:
    """keep_B and after_B of parts of which no state is kept."""
    return torch.full((parts,), TRASH), torch.zeros(parts, dtype=torch.int32)
