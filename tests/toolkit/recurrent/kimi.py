"""Layers of Kimi's rule in the middle of texts, for tests of its kernels: as rounds.py has those of the gated delta rule.

Shapes: as of specdec/ops/recurrent/kimi_delta.py.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.limits import ZEROS
from specdec.ops.recurrent.kimi_delta import KimiGates, tree_outputs
from specdec.ops.recurrent.states import RuleStates, TreeSteps
from toolkit.recurrent.made import path_to, random_tree, steps_of
from toolkit.recurrent.rounds import NUMBERS, OWN, ROWS


class KimiWidths(NamedTuple):
    """Heads, and the width of each one's keys and values."""

    H: int = 3
    K: int = 16


class KimiRound(NamedTuple):
    """A pass over trees that is about to run, on a CPU.  y_TC: what the convolution gave."""

    y_TC: Tensor
    gates: KimiGates
    memory: RuleStates
    steps: TreeSteps


def kimi_tokens(sizes: KimiWidths, tokens: int, dtype: torch.dtype) -> tuple[Tensor, KimiGates]:
    """Log-decays go down to about -20; some channels of one token have -100 and less, and all of another one."""
    H, K = sizes
    wide = torch.promote_types(dtype, torch.float32)
    y_TC, a_TC, b_TH = (torch.randn(tokens, width).mul(2).to(dtype) for width in (3 * H * K, H * K, H))
    a_TC[tokens // 2, ::3] += 90
    a_TC[tokens // 3] += 90
    return y_TC, KimiGates(a_TC, b_TH, torch.rand(H, dtype=wide).mul(3), torch.rand(H * K, dtype=wide))


def poisoned_kimi(sizes: KimiWidths, nodes: int, dtype: torch.dtype) -> RuleStates:
    """Full of NaN, but for the state before any text."""
    (H, K), wide = sizes, torch.promote_types(dtype, torch.float32)
    memory = RuleStates(
        torch.full((NUMBERS, H, K, K), torch.nan, dtype=wide),
        *(torch.full((OWN, nodes, H, K), torch.nan, dtype=wide) for _ in range(3)),
    )
    memory.state_PHKV[ZEROS] = 0
    return memory


def kimi_in_the_middle(
    sizes: KimiWidths, nodes: int, chain: bool, dtype: torch.dtype, seed: int, before: int = 6
) -> KimiRound:  # fmt: skip
    """before: nodes of the trees before, some of whose paths are pending."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    memory = poisoned_kimi(sizes, max(nodes, before), dtype)
    for number in (2, 4, 9):
        memory.state_PHKV[number] = torch.randn(memory.state_PHKV.shape[1:])
    trees = [random_tree(before, rng, row == 0) for row in range(2)]
    y_TC, gates = kimi_tokens(sizes, 2 * before, dtype)
    tree_outputs(y_TC, gates, memory, steps_of(trees, [(9, 2), (9, 4)], [[], []], before))
    paths = [[], path_to(trees[0], before - 1), path_to(trees[1], rng.randrange(before)), [], []]
    steps = steps_of([random_tree(nodes, rng, chain) for _ in ROWS], list(ROWS), paths, before)
    return KimiRound(*kimi_tokens(sizes, len(ROWS) * nodes, dtype), memory, steps)
