"""A layer's memory in the middle of texts: rows with and without a pending path, and a row of padding, for tests of kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.limits import TRASH, ZEROS
from specdec.ops.recurrent.conv import tree_convolution
from specdec.ops.recurrent.gated_delta import tree_outputs
from specdec.ops.recurrent.states import ChunkSteps, ConvStates, LayerStates, RuleStates, TreeSteps
from toolkit.recurrent.made import Sizes, Weights, path_to, poisoned, random_tree, steps_of, trash_steps

NUMBERS, OWN = 10, 8  # the last two hold kept states, and never nodes
ROWS = ((9, 7), (2, 3), (4, 5), (ZEROS, 6), (ZEROS, TRASH))  # what each reads and writes; the first has nothing pending

Steps = TypeVar("Steps", TreeSteps, ChunkSteps)


class RoundInputs(NamedTuple):
    """A pass over trees that is about to run, on a CPU.  x_TC, a_TH, b_TH: what the layer's projections gave."""

    weights: Weights
    layer: LayerStates
    steps: TreeSteps
    x_TC: Tensor
    a_TH: Tensor
    b_TH: Tensor


def in_the_middle(sizes: Sizes, nodes: int, chain: bool, dtype: torch.dtype, seed: int, before: int = 6) -> RoundInputs:
    """before: nodes of the trees before, some of whose paths are pending."""
    rng, wide = random.Random(seed), torch.promote_types(dtype, torch.float32)
    torch.manual_seed(seed)
    weights, layer = Weights.random(sizes, dtype, 1.0 + seed % 2), poisoned(sizes, NUMBERS, OWN, max(nodes, before), dtype)
    for number in (2, 4, 9):
        layer.rule.state_PHKV[number] = torch.randn(sizes.H, sizes.K, sizes.V, dtype=wide)
        layer.conv.conv_PWC[number] = torch.randn(sizes.Z - 1, sizes.C).to(dtype)
    trees = [random_tree(before, rng, row == 0) for row in range(2)]
    first = RoundInputs(weights, layer, steps_of(trees, [(9, 2), (9, 4)], [[], []], before), *inputs(sizes, 2 * before, dtype))
    y_TC = tree_convolution(first.x_TC, weights.conv, layer.conv, first.steps)
    tree_outputs(y_TC, weights.gates(first.a_TH, first.b_TH), layer.rule, first.steps)
    paths = [[], path_to(trees[0], before - 1), path_to(trees[1], rng.randrange(before)), [], []]
    steps = steps_of([random_tree(nodes, rng, chain) for _ in ROWS], list(ROWS), paths, before)
    return RoundInputs(weights, layer, steps, *inputs(sizes, len(ROWS) * nodes, dtype))


def inputs(sizes: Sizes, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of the convolution, and of the two gates, with one log-decay of -100 and less."""
    x, a, b = (torch.randn(tokens, width).mul(2).to(dtype) for width in (sizes.C, sizes.H, sizes.H))
    a[tokens // 2] += 90
    return x, a, b


def parts_of(lengths: list[int], kept: int, after: int) -> ChunkSteps:
    """Parts of the rows above, and one of padding.  kept: the part whose state after so many tokens number 8 is to hold."""
    rows = ROWS[: len(lengths)] + ROWS[-1:]
    read_B, write_B = torch.tensor(list(zip(*rows)))
    keep_B, after_B = trash_steps(len(rows))
    keep_B[kept], after_B[kept] = 8, after
    cu_B1 = torch.tensor([0, *lengths, 0]).cumsum(0).int()
    return ChunkSteps(read_B, write_B, cu_B1, keep_B, after_B, max(lengths))


def mapped(layer: LayerStates, change: Callable[[Tensor], Tensor]) -> LayerStates:
    """Another memory, of what `change` makes of each tensor."""
    conv, rule = layer
    return LayerStates(ConvStates(*map(change, conv)), None if rule is None else RuleStates(*map(change, rule)))


def copied(layer: LayerStates, device: torch.device) -> LayerStates:
    return mapped(layer, lambda each: each.clone().to(device))


def moved(steps: Steps, device: torch.device) -> Steps:
    return steps._replace(**{name: each.to(device) for name, each in steps._asdict().items() if isinstance(each, Tensor)})


def equal_memory(got: LayerStates, want: LayerStates, tolerance: float) -> None:
    """But for number 1, which is trash.  What nobody has written is still NaN."""
    kept = [number for number in range(NUMBERS) if number != TRASH]
    for ours, theirs in zip((*got.conv, *(got.rule or ())), (*want.conv, *(want.rule or ())), strict=True):
        own = kept[: len(theirs) - 1]
        torch.testing.assert_close(ours.cpu()[own], theirs[own], atol=tolerance, rtol=tolerance, equal_nan=True)
