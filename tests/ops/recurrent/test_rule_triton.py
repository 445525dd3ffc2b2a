"""The kernels of the gated delta rule against its definition.  Under Triton's interpreter where there is no GPU."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.recurrent.made import Sizes
from toolkit.recurrent.rounds import copied, equal_memory, in_the_middle, inputs, moved, parts_of

from specdec.ops.recurrent.chunks import launch
from specdec.ops.recurrent.chunks.launch import ChunkTiles
from specdec.ops.recurrent.gated_delta import Gates, chunk_outputs, tree_outputs
from specdec.ops.recurrent.trees.rule_triton import launch_tree_rule

ALIKE, SHARED = Sizes(G=2, H=2, K=16, V=32), Sizes(G=1, H=3, K=32, V=16)
UNEVEN = Sizes(G=1, H=2, K=48, V=80)  # no powers of two, as OLMo's 96 and 192
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def on_device(gates: Gates) -> Gates:
    return Gates(*(each.to(DEVICE) for each in gates.tensors), gates.most)


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize(
    ("sizes", "nodes", "kind", "before", "dtype"),
    [
        (SHARED, 1, "chain", 1, torch.float16),
        (ALIKE, 1, "chain", 6, torch.float32),
        (ALIKE, 6, "chain", 6, torch.float16),
        (SHARED, 7, "tree", 6, torch.float32),
        (SHARED, 32, "chain", 2, torch.float32),
        (ALIKE, 32, "tree", 6, torch.float32),
        (SHARED, 20, "deep tree", 6, torch.float32),
        (SHARED, 60, "tree", 20, torch.float16),
        (UNEVEN, 1, "chain", 6, torch.float16),
        (UNEVEN, 7, "tree", 6, torch.float32),
        (UNEVEN, 20, "tree", 6, torch.float32),
    ],
)
def test_trees_equal_the_definition(sizes: Sizes, nodes: int, kind: str, before: int, dtype: torch.dtype) -> None:
    """Keeps out: a node that sees a node beside its path, a level of the system left out, a decay that overflows, a pending
    path that is added twice, in part, or from a number that holds no nodes, a key head's keys left by another one, columns
    beyond a width that is no power of two.
    """
    now = in_the_middle(sizes, nodes, kind != "tree", dtype, seed=nodes, before=before)
    if kind == "deep tree":
        now.steps.parents_BN[:, -2:] = 3
        now = now._replace(steps=now.steps._replace(is_chain=False))
    y, gates = now.x_TC, now.weights.gates(now.a_TH, now.b_TH)
    layer = copied(now.layer, DEVICE)
    got = launch_tree_rule(y.to(DEVICE), on_device(gates), layer.rule, moved(now.steps, DEVICE)).cpu()
    want = tree_outputs(y, gates, now.layer.rule, now.steps)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    equal_memory(layer, now.layer, 1e-5)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("nodes", [8, 20])
@pytest.mark.parametrize("broken", ["query", "key", "value", "decay", "strength"])
def test_a_broken_node_reaches_those_below_it_alone(broken: str, nodes: int) -> None:
    """Keeps out: a draft token that overflows and fails a request, which without drafts would have gone on."""
    now = in_the_middle(ALIKE, nodes, False, torch.float32, seed=3, before=2)
    node, parents = 4, now.steps.parents_BN
    below_BN = parents == -1  # nodes that are the broken one, or below it
    below_BN[:, node] = True
    for child in range(node + 1, nodes):
        below_BN[:, child] |= below_BN.gather(1, parents[:, child : child + 1])[:, 0]
    y, a, b = now.x_TC.clone(), now.a_TH.clone(), now.b_TH.clone()
    clean = tree_outputs(y, now.weights.gates(a, b), copied(now.layer, torch.device("cpu")).rule, now.steps)
    for row in range(len(parents)):
        at, columns = nodes * row + node, {"query": 1, "key": ALIKE.G * ALIKE.K + 1, "value": 2 * ALIKE.G * ALIKE.K + 1}
        if broken in columns:
            y[at, columns[broken]] = torch.inf if row % 2 else torch.nan
        (a if broken == "decay" else b)[at, 0] = torch.nan if broken in ("decay", "strength") else 0.0
    gates, layer = now.weights.gates(a, b), copied(now.layer, DEVICE)
    got = launch_tree_rule(y.to(DEVICE), on_device(gates), layer.rule, moved(now.steps, DEVICE)).cpu()
    want = tree_outputs(y, gates, now.layer.rule, now.steps)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, equal_nan=True)
    equal_memory(layer, now.layer, 1e-5)
    beside_T = ~below_BN.flatten()
    torch.testing.assert_close(want[beside_T], clean[beside_T])
    assert beside_T.any() and want.view(*parents.shape, -1)[:, node].isnan().any(-1).all()


@pytest.mark.parametrize(
    ("sizes", "lengths", "kept", "after", "dtype", "tiles", "search"),
    [
        (ALIKE, [1, 37, 70], 2, 32, torch.float16, None, 2),
        (SHARED, [133, 3, 2], 0, 73, torch.float32, ChunkTiles(64, 16, 4, 1), 4),
        (SHARED, [2], 0, 1, torch.float32, None, 32),
        (UNEVEN, [5, 40], 1, 32, torch.float32, None, 32),
    ],
    ids=["blocks of 32", "blocks of 64", "two tokens", "widths that are padded"],
)
def test_parts_equal_the_definition(
    sizes: Sizes, lengths: list[int], kept: int, after: int, dtype: torch.dtype, tiles: ChunkTiles | None, search: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Keeps out: a block's border that shows, a block that is nobody's where parts are many, a state that is kept one token
    late, a part of padding that reaches a row, a token after the parts that is read.
    """
    monkeypatch.setattr(launch, "SEARCH", search)
    now = in_the_middle(sizes, 2, False, dtype, seed=len(lengths))
    steps, layer, tokens = parts_of(lengths, kept, after), copied(now.layer, DEVICE), sum(lengths)
    y, a, b = (torch.cat((each, each.new_full((3, each.shape[1]), torch.nan))) for each in inputs(sizes, tokens, dtype))
    gates = now.weights.gates(a, b)
    got = launch.launch_chunk_rule(y.to(DEVICE), on_device(gates), layer.rule, moved(steps, DEVICE), tiles).cpu()
    want = chunk_outputs(y, gates, now.layer.rule, steps)
    torch.testing.assert_close(got[:tokens], want[:tokens], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    equal_memory(layer, now.layer, 2e-5)
