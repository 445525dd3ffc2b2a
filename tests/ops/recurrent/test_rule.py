"""Recurrent layers over trees, parts and whole rows against the rule, run along each path alone, in float64."""

from __future__ import annotations

import random

import pytest
import torch
from toolkit.recurrent.made import (
    Known,
    Sizes,
    Weights,
    by_the_rule,
    nothing,
    path_to,
    poisoned,
    random_tree,
    steps_of,
    trash_steps,
)
from torch import Tensor

from specdec.ops.recurrent.conv import chunk_convolution, convolved, tree_convolution
from specdec.ops.recurrent.gated_delta import chunk_outputs, row_outputs, tree_outputs
from specdec.ops.recurrent.states import ChunkSteps

SIZES = Sizes()


def close(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got, want, atol=1e-9, rtol=1e-9)


@pytest.mark.slow_cases
@pytest.mark.parametrize("seed", range(4))
def test_nodes_and_commits(seed: int) -> None:
    """Keeps out: a node that sees a node beside its path, a path added twice or not at all, a number that another sequence
    reads, a decay that overflows between branches, and memory that nobody has written reaching an output.
    """
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        rng = random.Random(seed)
        weights, layer = Weights.random(SIZES, torch.float64, rng.choice([1.0, 2.0])), poisoned(SIZES, 8, 8, 40, torch.float64)
        texts, numbers, paths = [nothing(SIZES)] * 3, [[0, 2, 3], [0, 4, 5], [0, 6, 7]], [[], [], []]
        for _ in range(5):
            nodes, chain = rng.choice([1, 2, 6, 33]), rng.random() < 0.3
            trees = [random_tree(nodes, rng, chain) for _ in texts]
            steps = steps_of(trees, [(read, write) for read, write, _ in numbers], paths, places=40)
            x, a, b = (torch.randn(3 * nodes, width) * 2 for width in (SIZES.C, SIZES.H, SIZES.H))
            a[rng.randrange(len(a))] += 18  # a decay of e^-200 and less
            y = tree_convolution(x, weights.conv, layer.conv, steps)
            out = tree_outputs(y, weights.gates(a, b), layer.rule, steps).view(3, nodes, SIZES.H, SIZES.V)
            for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
                own = [part.view(3, nodes, -1)[row] for part in (x, a, b)]
                for leaf in set(range(nodes)) - {parent for node, parent in enumerate(tree) if node}:
                    path = path_to(tree, leaf)
                    want, _ = by_the_rule(*(part[path] for part in own), weights, SIZES, text)
                    assert close(out[row, path], want)
                read, write, other = numbers[row]
                if torch.any(text.state_HKV):
                    assert close(layer.rule.state_PHKV[write], text.state_HKV)
                numbers[row], paths[row] = [write, other, write], path_to(tree, rng.randrange(nodes))
                added = [part[paths[row]] for part in own]
                _, states = by_the_rule(*added, weights, SIZES, text)
                texts[row] = Known(torch.cat((text.x_YC, added[0]))[1 - SIZES.Z :], states[-1])
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("cuts", [[70, 1, 9], [64, 64], [1, 1, 1, 130]])
def test_parts_are_one_text(cuts: list[int]) -> None:
    """Keeps out: a part that begins from another state than its text's, a block's border that shows, and a kept state that is
    not that of its place.
    """
    torch.manual_seed(sum(cuts))
    weights = Weights.random(SIZES, torch.float64)
    layer = poisoned(SIZES, 9, 6, 4, torch.float64)
    total, rng = sum(cuts), random.Random(len(cuts))
    texts = [[torch.randn(total, width, dtype=torch.float64) for width in (SIZES.C, SIZES.H, SIZES.H)] for _ in range(2)]
    wanted = [by_the_rule(*text, weights, SIZES) for text in texts]
    for (x, a, b), (outputs, _) in zip(texts, wanted, strict=True):
        y = convolved(torch.cat((x.new_zeros(3, SIZES.C), x))[None], weights.conv)
        assert close(row_outputs(y, weights.gates(a, b), SIZES.G, SIZES.K)[0], outputs)
    done, numbers = 0, [[0, 2, 3], [0, 4, 5]]
    for cut in cuts:
        after = rng.randrange(1, cut + 1)
        read_B, write_B = torch.tensor([row[:2] for row in numbers]).unbind(1)
        keep_B, after_B = trash_steps(2)
        keep_B[1], after_B[1] = 7, after
        steps = ChunkSteps(read_B, write_B, torch.tensor([0, cut, 2 * cut], dtype=torch.int32), keep_B, after_B, cut)
        x, a, b = (
            torch.cat((*(text[i][done : done + cut] for text in texts), texts[0][i][:3])) for i in range(3)
        )  # padding last
        out = chunk_outputs(chunk_convolution(x, weights.conv, layer.conv, steps), weights.gates(a, b), layer.rule, steps)
        for row, (outputs, states) in enumerate(wanted):
            assert close(out[row * cut : (row + 1) * cut], outputs[done : done + cut])
            assert close(layer.rule.state_PHKV[numbers[row][1]], states[done + cut - 1])
        assert close(layer.rule.state_PHKV[7], wanted[1][1][done + after - 1])
        before = torch.cat((texts[1][0].new_zeros(3, SIZES.C), texts[1][0]))
        assert torch.equal(layer.conv.conv_PWC[7], before[done + after : done + after + 3])
        numbers = [[write, other, write] for _, write, other in numbers]
        done += cut
