"""Recurrent layers of Qwen3.5's and of OLMo Hybrid's widths in bfloat16 on a GPU, against the definition in float64.

Shapes: as of specdec/ops/recurrent/states.py.
"""

import random

import pytest
import torch
from toolkit.inside.captures import capturing
from toolkit.recurrent.made import Sizes, Weights, path_to, random_tree, steps_of, trash_steps
from toolkit.recurrent.rounds import mapped
from torch import Tensor

from specdec.ops.recurrent.chunks.launch import launch_chunk_rule
from specdec.ops.recurrent.conv import Convolution, chunk_convolution, tree_convolution
from specdec.ops.recurrent.gated_delta import Gates, chunk_outputs, tree_outputs
from specdec.ops.recurrent.states import ChunkSteps, ConvStates, LayerStates, RuleStates, TreeSteps
from specdec.ops.recurrent.trees.rule_triton import launch_tree_rule

pytestmark = pytest.mark.gpu
SIZES = Sizes(G=16, H=48, K=128, V=128)
OLMO = Sizes(G=30, H=30, K=96, V=192)  # whose widths are no powers of two
ROWS, NODES, PATH = 32, 32, 6
BOUNDS = {"tf32x3": 5e-6, "ieee": 5e-6}  # of what is float32: states and what nodes leave, as a share of their norm


def layer_of(numbers: int, nodes: int, sizes: Sizes = SIZES) -> LayerStates:
    G, H, K, V, Z = sizes
    made = {"device": "cuda"}
    inputs = (torch.randn(numbers, each, sizes.C, **made).bfloat16() for each in (Z - 1, nodes))
    rule = RuleStates(
        torch.randn(numbers, H, K, V, **made).mul(0.3),
        torch.nn.functional.normalize(torch.randn(numbers, nodes, G, K, **made), dim=-1),
        torch.randn(numbers, nodes, H, V, **made), -torch.rand(numbers, nodes, H, **made).cumsum(1),
    )  # fmt: skip
    return LayerStates(ConvStates(*inputs), rule)


def tokens_of(count: int, sizes: Sizes = SIZES) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(count, width, device="cuda").bfloat16() for width in (sizes.C, sizes.H, sizes.H))  # type: ignore[return-value]


def weights_of(sizes: Sizes = SIZES) -> Weights:
    """Strengths of OLMo's are up to 2."""
    most = 2.0 if sizes == OLMO else 1.0
    return Weights(*(each.cuda() for each in Weights.random(sizes, torch.bfloat16)[:3]), most)


def doubled(gates: Gates) -> Gates:
    """With strengths as bfloat16 rounds them: what the definition does in float64 begins after that."""
    beta_TH = gates.b_TH.sigmoid().double()
    decays = gates.A_log_H.double(), gates.dt_bias_H.double()
    return Gates(gates.a_TH.double(), (beta_TH / (1 - beta_TH)).log(), *decays, gates.most)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def trees(kind: str, seed: int) -> TreeSteps:
    """Of rows that read numbers 2, 4, ... and write those after them.  kind: plain, chain or tree."""
    rng, nodes = random.Random(seed), {"plain": 1, "chain": 6, "tree": NODES}[kind]
    made = [random_tree(nodes, rng, kind != "tree") for _ in range(ROWS)]
    if kind == "tree":  # of depth 5 at most
        made = [[0, *(rng.choice([n for n in range(at) if len(path_to(tree, n)) < 6]) for at in range(1, nodes))]
                for tree in ([0] * nodes for _ in range(ROWS))]  # fmt: skip
    paths = [list(range(rng.randrange(PATH + 1))) for _ in range(ROWS)]
    return steps_of(made, [(2 + 2 * row, 3 + 2 * row) for row in range(ROWS)], paths, PATH, "cuda")


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("sizes", [SIZES, OLMO], ids=["qwen", "olmo"])
@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
def test_trees_of_real_widths(kind: str, sizes: Sizes, precision: str) -> None:
    """Keeps out: products that lose float32's accuracy, and a program that reads what another one writes."""
    steps, layer, weights = trees(kind, 1), layer_of(2 + 2 * ROWS, NODES, sizes), weights_of(sizes)
    exact = mapped(layer, torch.Tensor.double)
    y, a, b = tokens_of(steps.parents_BN.numel(), sizes)
    gates = weights.gates(a, b)
    with torch.inference_mode():
        out = launch_tree_rule(y, gates, layer.rule, steps, precision)
    want = tree_outputs(y.double(), doubled(gates), exact.rule, steps)
    N, here = steps.parents_BN.shape[1], steps.write_B
    errors = {"states": error(layer.rule.state_PHKV[here], exact.rule.state_PHKV[here])}
    for name in ("k_LNGK", "u_LNHV", "decay_LNH"):
        errors[name] = error(getattr(layer.rule, name)[here, :N], getattr(exact.rule, name)[here, :N])
    print(f"{kind}, {precision}: outputs {error(out, want):.1e},", {name: f"{value:.1e}" for name, value in errors.items()})
    assert error(out, want) < 3e-3 and max(errors.values()) < BOUNDS[precision]


@pytest.mark.parametrize(
    ("lengths", "sizes"), [([8192], SIZES), ([1, 700, 64, 33], SIZES), ([1, 700, 64, 33], OLMO)], ids=["long", "many", "olmo"]
)
def test_parts_of_real_widths(lengths: list[int], sizes: Sizes) -> None:
    """Keeps out: an error that grows from block to block, and halves of which the compiler leaves nothing to the second."""
    B, tokens = len(lengths), sum(lengths)
    layer, weights = layer_of(2 + 2 * B, 1, sizes), weights_of(sizes)
    exact = mapped(layer, torch.Tensor.double)
    read_B, write_B = torch.tensor([[2 + 2 * b, 3 + 2 * b] for b in range(B)], device="cuda").T.contiguous()
    cu_B1 = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    steps = ChunkSteps(read_B, write_B, cu_B1, *(each.cuda() for each in trash_steps(B)), max(lengths))
    x, a, b = tokens_of(tokens, sizes)
    gates = weights.gates(a, b)
    with torch.inference_mode():
        y = chunk_convolution(x, weights.conv, layer.conv, steps)
        out = launch_chunk_rule(y, gates, layer.rule, steps)
    want_y = chunk_convolution(x.double(), Convolution(weights.conv_ZC.double()), exact.conv, steps)
    want = chunk_outputs(y.double(), doubled(gates), exact.rule, steps)
    states = error(layer.rule.state_PHKV[write_B], exact.rule.state_PHKV[write_B])
    print(f"{lengths}: convolution {error(y, want_y):.1e}, outputs {error(out, want):.1e}, states {states:.1e}")
    # Of outputs 1.7e-3 are their own rounding; what only goes into them is rounded to 16 bits, too: see chunks/launch.py.
    # States: 3.4e-5 on an H200 after 8,192 tokens, 1e-3 where a second half is lost.
    assert error(y, want_y) < 3e-3 and error(out, want) < 4e-3 and states < 6e-5
    assert torch.equal(layer.conv.conv_PWC[write_B].double(), exact.conv.conv_PWC[write_B])


def test_a_captured_round_moves_numbers() -> None:
    """Keeps out: a number that a capture has kept, and a kernel that reads a state before the round before has written it."""
    steps, layer, weights = trees("tree", 2), layer_of(2 + 2 * ROWS, NODES), weights_of()
    x, a, b = tokens_of(ROWS * NODES)
    gates = weights.gates(a, b)

    def rounds(layer: LayerStates) -> Tensor:
        return tree_outputs(tree_convolution(x, weights.conv, layer.conv, steps), gates, layer.rule, steps)

    with torch.inference_mode():
        rounds(mapped(layer, torch.clone))
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            out = rounds(layer)
        for turn in range(4):
            own = mapped(layer, torch.clone)
            want = rounds(own)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, want) and all(map(torch.equal, (*layer.conv, *layer.rule), (*own.conv, *own.rule))), turn
            after = trees("tree", 3 + turn)  # numbers swapped, other trees and paths
            steps.read_B.copy_(torch.where(steps.read_B % 2 == 0, steps.read_B + 1, steps.read_B - 1))
            steps.write_B.copy_(torch.where(steps.write_B % 2 == 0, steps.write_B + 1, steps.write_B - 1))
            for ours, new in (
                (steps.parents_BN, after.parents_BN),
                (steps.path_BE, after.path_BE),
                (steps.count_B, after.count_B),
            ):
                ours.copy_(new)
