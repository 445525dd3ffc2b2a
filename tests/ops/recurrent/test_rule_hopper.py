"""The gated delta rule over trees by the kernel for Hopper GPUs, against its definition there; elsewhere what can be seen."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.recurrent.made import Sizes
from toolkit.recurrent.rounds import RoundInputs, copied, equal_memory, in_the_middle, moved

from specdec.ops.recurrent.gated_delta import Gates, tree_outputs
from specdec.ops.recurrent.states import RuleStates
from specdec.ops.recurrent.trees.hopper_tiles import HopperTiles, hopper_tiles, takes
from specdec.ops.recurrent.trees.rule_triton import launch_tree_rule

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="a kernel for Hopper GPUs")
SIZES = Sizes(G=1, H=3, K=128, V=128)


def on_device(gates: Gates) -> Gates:
    return Gates(*(each.to(DEVICE) for each in gates.tensors), gates.most)


def float32_error(now: RoundInputs) -> float:
    """By how much the memory that the definition leaves in float32 differs from that in float64: |a - b| / (1 + |b|)."""
    y, gates = now.x_TC, now.weights.gates(now.a_TH, now.b_TH)
    assert now.layer.rule is not None
    exact = RuleStates(*(each.double() for each in now.layer.rule))
    rounded = RuleStates(*(each.clone() for each in now.layer.rule))
    for memory in (exact, rounded):
        tree_outputs(y, gates, memory, now.steps)
    return max(float(((a - b).abs() / (1 + b.abs())).nan_to_num(0).max()) for a, b in zip(rounded, exact))


def test_a_long_chain_rounds_more_often() -> None:
    """Keeps out: one bound for all chains.  In float32 the definition itself loses more than ten times as much over 64 nodes as
    over 7."""
    short, long = (in_the_middle(SIZES, nodes, True, torch.bfloat16, seed=nodes) for nodes in (7, 64))
    assert 0 < 10 * float32_error(short) < float32_error(long) < 2e-5


def test_passes_that_the_kernel_takes() -> None:
    """Keeps out: a pass on another GPU, and tiles that cut a head's values unevenly."""
    now = in_the_middle(SIZES, 7, True, torch.bfloat16, seed=1)
    assert now.layer.rule is not None and not takes(now.x_TC, now.layer.rule, 7)
    for rows in (1, 2, 3, 32):
        for nodes in (2, 16, 17, 32, 33, 64):
            assert 128 % (16 * hopper_tiles(rows, nodes, 48, 128).warps) == 0


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("nodes", "kind", "before", "tiles"),
    [
        (7, "chain", 6, None),
        (2, "chain", 1, HopperTiles(4, 168, 1)),
        (16, "deep tree", 6, HopperTiles(8, 128, 1)),
        (17, "chain", 20, HopperTiles(4, 168, 2, 4)),
        (32, "tree", 6, None),
        (20, "tree", 6, HopperTiles(4, 168, 2, 4)),
        (32, "chain", 2, HopperTiles(8, 0, 0, 4)),
        (33, "tree", 20, None),
        (64, "chain", 6, HopperTiles()),
        (32, "tree", 6, HopperTiles(4, 168, 2, 4, True)),
        (32, "chain", 20, HopperTiles(4, 128, 2, 4, True)),
        (6, "chain", 2, HopperTiles(4, 168, 1, 1, True)),
        (60, "tree", 6, HopperTiles(8, 0, 1, 1, True)),
        (32, "tree", 20, HopperTiles(8, 128, 2, 4, True)),
    ],
)
def test_trees_equal_the_definition(nodes: int, kind: str, before: int, tiles: HopperTiles | None) -> None:
    """Keeps out: columns or nodes in another order, a node that sees a node beside its path, a pending path that is added in
    part, keys that no program stores, a decay that overflows.
    """
    now = in_the_middle(SIZES, nodes, kind == "chain", torch.bfloat16, seed=nodes, before=before)
    if kind == "deep tree":
        now.steps.parents_BN[:, -2:] = 3
    y, gates = now.x_TC, now.weights.gates(now.a_TH, now.b_TH)
    layer, on_gpu, rounding = copied(now.layer, DEVICE), y.to(DEVICE), float32_error(now)
    assert layer.rule is not None and takes(on_gpu, layer.rule, nodes)
    got = launch_tree_rule(on_gpu, on_device(gates), layer.rule, moved(now.steps, DEVICE), tiles=tiles).cpu()
    want = tree_outputs(y, gates, now.layer.rule, now.steps)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    equal_memory(layer, now.layer, max(2e-5, 8 * rounding))  # two ways to round, each in an order of sums of its own


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("nodes", [8, 20])
@pytest.mark.parametrize("broken", ["query", "key", "value", "decay", "strength"])
def test_a_broken_node_is_as_the_definition_has_it(broken: str, nodes: int) -> None:
    """Keeps out: a draft token that overflows and reaches a node beside it, through products or through the tensor cores."""
    now = in_the_middle(SIZES, nodes, False, torch.bfloat16, seed=3, before=2)
    y, a, b = now.x_TC.clone(), now.a_TH.clone(), now.b_TH.clone()
    for row in range(len(now.steps.parents_BN)):
        at, columns = nodes * row + 4, {"query": 1, "key": SIZES.G * SIZES.K + 1, "value": 2 * SIZES.G * SIZES.K + 1}
        if broken in columns:
            y[at, columns[broken]] = torch.inf if row % 2 else torch.nan
        elif broken == "decay":
            a[at, 0] = torch.nan
        else:
            b[at, 0] = torch.nan
    gates, layer = now.weights.gates(a, b), copied(now.layer, DEVICE)
    got = launch_tree_rule(y.to(DEVICE), on_device(gates), layer.rule, moved(now.steps, DEVICE)).cpu()
    want = tree_outputs(y, gates, now.layer.rule, now.steps)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2, equal_nan=True)
    equal_memory(layer, now.layer, 2e-5)
    assert want.isnan().any()
