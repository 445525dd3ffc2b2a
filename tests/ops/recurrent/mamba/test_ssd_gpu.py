"""Mamba-2's rule at published widths in bfloat16 on a GPU, against the definition in float64.

Shapes: as of specdec/ops/recurrent/states.py.
"""

import random

import pytest
import torch
from toolkit.inside.captures import capturing
from toolkit.recurrent.made import Sizes, random_tree, steps_of, trash_steps, turn_numbers
from toolkit.recurrent.mamba import SsdWeights, ssd_inputs
from torch import Tensor

from specdec.ops.recurrent.conv import Convolution, tree_convolution
from specdec.ops.recurrent.mamba.launch import launch_ssd_parts
from specdec.ops.recurrent.mamba.ssd_step_triton import launch_convolved_step
from specdec.ops.recurrent.mamba.ssd_tree_triton import launch_ssd_tree
from specdec.ops.recurrent.ssd import SsdGates, chunk_outputs, tree_outputs
from specdec.ops.recurrent.states import ChunkSteps, ConvStates, LayerStates, RuleStates, TreeSteps

pytestmark = pytest.mark.gpu
WIDTHS = {
    "Nemotron-3-Nano": Sizes(G=8, H=64, K=128, V=64),
    "Granite-4-H-Small": Sizes(G=1, H=128, K=128, V=64),
    "Falcon-H1-1.5B": Sizes(G=1, H=48, K=256, V=64),
}
PATH = 6


def memory_of(sizes: Sizes, numbers: int, nodes: int) -> RuleStates:
    G, H, K, V, _ = sizes
    made = {"device": "cuda"}
    return RuleStates(
        torch.randn(numbers, H, K, V, **made).mul(0.3), torch.randn(numbers, nodes, G, K, **made) / K**0.5,
        torch.randn(numbers, nodes, H, V, **made), -torch.rand(numbers, nodes, H, **made).cumsum(1),
    )  # fmt: skip


def tokens_of(sizes: Sizes, count: int) -> tuple[Tensor, SsdGates]:
    y, dt = (each.cuda() for each in ssd_inputs(sizes, count, torch.bfloat16))
    return y, SsdGates(dt, *(each.cuda() for each in SsdWeights.random(sizes.H)))


def doubled(gates: SsdGates) -> SsdGates:
    return SsdGates(*(each.double() for each in gates))


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def trees(rows: int, nodes: int, seed: int) -> TreeSteps:
    """Of rows that read numbers 2, 4, ... and write those after them."""
    rng = random.Random(seed)
    made = [random_tree(nodes, rng, nodes <= 6) for _ in range(rows)]
    paths = [list(range(rng.randrange(PATH + 1))) for _ in range(rows)]
    return steps_of(made, [(2 + 2 * row, 3 + 2 * row) for row in range(rows)], paths, PATH, "cuda")


@pytest.mark.parametrize("nodes", [1, 6, 32, 60, 65, 128])
@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("name", WIDTHS)
def test_trees_of_real_widths(name: str, rows: int, nodes: int) -> None:
    """Keeps out: products that lose float32's accuracy, and a program that reads what another one writes."""
    sizes, steps = WIDTHS[name], trees(rows, nodes, 1)
    layer = memory_of(sizes, 2 + 2 * rows, max(nodes, PATH))
    exact = RuleStates(*(each.double() for each in layer))
    y, gates = tokens_of(sizes, rows * nodes)
    with torch.inference_mode():
        out = launch_ssd_tree(y, gates, layer, steps)
    want, here = tree_outputs(y.double(), doubled(gates), exact, steps), steps.write_B
    errors = [error(layer.state_PHKV[here], exact.state_PHKV[here])]
    errors += [error(ours[here, :nodes], theirs[here, :nodes]) for ours, theirs in zip(layer[1:], exact[1:], strict=True)]
    print(f"{name}, {rows} x {nodes}: outputs {error(out, want):.1e},", [f"{value:.1e}" for value in errors])
    assert error(out, want) < 3e-3 and max(errors) < 5e-6


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("name", WIDTHS)
def test_a_step_is_what_two_launches_give(name: str, rows: int) -> None:
    """Keeps out: a step that rounds otherwise than the convolution and the rule, which texts that end in chunks go through."""
    sizes, steps = WIDTHS[name], trees(rows, 1, 4)
    rule, W = memory_of(sizes, 2 + 2 * rows, PATH), sizes.Z - 1
    last, left = (torch.randn(2 + 2 * rows, each, sizes.C, device="cuda").bfloat16() for each in (W, PATH))
    one = LayerStates(ConvStates(last, left), rule)
    two = LayerStates(ConvStates(last.clone(), left.clone()), RuleStates(*(each.clone() for each in rule)))
    x, gates = tokens_of(sizes, rows)
    conv = Convolution(*(torch.randn(*each, device="cuda").bfloat16() for each in ((W + 1, sizes.C), (sizes.C,))))
    with torch.inference_mode():
        got = launch_convolved_step(x, conv, gates, one, steps)
        want = launch_ssd_tree(tree_convolution(x, conv, two.conv, steps), gates, two.rule, steps)
    assert error(got, want) < 3e-3 and all(map(torch.equal, one.conv, two.conv))
    here = steps.write_B
    assert all(error(ours[here], theirs[here]) < 5e-6 for ours, theirs in zip(one.rule, two.rule, strict=True))


@pytest.mark.parametrize("lengths", [[8192], [1, 700, 64, 33]])
@pytest.mark.parametrize("name", WIDTHS)
def test_parts_of_real_widths(name: str, lengths: list[int]) -> None:
    """Keeps out: an error that grows from block to block, and halves of which the compiler leaves nothing to the second."""
    sizes, B = WIDTHS[name], len(lengths)
    layer = memory_of(sizes, 3 + 2 * B, 1)
    exact = RuleStates(*(each.double() for each in layer))
    read_B, write_B = torch.tensor([[2 + 2 * b, 3 + 2 * b] for b in range(B)], device="cuda").T.contiguous()
    keep_B, after_B = (each.cuda() for each in trash_steps(B))
    keep_B[-1], after_B[-1] = 2 + 2 * B, 32
    steps = ChunkSteps(
        read_B, write_B, torch.tensor([0, *lengths], device="cuda").cumsum(0).int(), keep_B, after_B, max(lengths)
    )
    y, gates = tokens_of(sizes, sum(lengths))
    with torch.inference_mode():
        out = launch_ssd_parts(y, gates, layer, steps)
    want = chunk_outputs(y.double(), doubled(gates), exact, steps)
    here = torch.cat((write_B, keep_B[-1:]))
    states = error(layer.state_PHKV[here], exact.state_PHKV[here])
    print(f"{name}, {lengths}: outputs {error(out, want):.1e}, states {states:.1e}")
    # Of outputs 1.7e-3 are their own rounding; what only goes into them is rounded to 16 bits, too: see mamba/launch.py.
    assert error(out, want) < 4e-3 and states < 2e-5


def test_a_captured_round_moves_numbers() -> None:
    """Keeps out: a number that a capture has kept, and a kernel that reads a state before the round before has written it."""
    sizes, rows, nodes = WIDTHS["Nemotron-3-Nano"], 12, 32
    steps, layer = trees(rows, nodes, 2)._replace(max_depth=nodes - 1), memory_of(sizes, 2 + 2 * rows, nodes)
    y, gates = tokens_of(sizes, rows * nodes)
    with torch.inference_mode():
        tree_outputs(y, gates, RuleStates(*(each.clone() for each in layer)), steps)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            out = tree_outputs(y, gates, layer, steps)
        for turn in range(4):
            own = RuleStates(*(each.clone() for each in layer))
            torch.cuda.synchronize()
            want = tree_outputs(y, gates, own, steps)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, want) and all(map(torch.equal, layer, own)), turn
            assert out.isfinite().all()
            turn_numbers(steps, trees(rows, nodes, 3 + turn), random.Random(turn))
