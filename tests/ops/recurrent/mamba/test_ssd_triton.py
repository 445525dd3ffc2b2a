"""The kernels of Mamba-2's rule against its definition.  Under Triton's interpreter where there is no GPU."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.recurrent.made import Sizes
from toolkit.recurrent.mamba import broken_in, check_trees, on_device, ssd_inputs, ssd_round
from toolkit.recurrent.rounds import copied, equal_memory, moved, parts_of

from specdec.ops.recurrent.chunks.launch import ChunkTiles
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.mamba.launch import launch_ssd_parts
from specdec.ops.recurrent.mamba.ssd_step_triton import StepTiles, launch_convolved_step
from specdec.ops.recurrent.ssd import chunk_outputs, convolved_tree_outputs, tree_outputs

ALONE, SHARED = Sizes(G=2, H=2, K=16, V=32), Sizes(G=2, H=6, K=32, V=16)
WIDE = Sizes(G=1, H=2, K=128, V=16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize(
    ("sizes", "nodes", "kind", "before", "dtype"),
    [
        (SHARED, 1, "chain", 1, torch.float16),
        (ALONE, 1, "chain", 6, torch.float32),
        (ALONE, 6, "chain", 6, torch.float16),
        (SHARED, 7, "tree", 6, torch.float32),
        (WIDE, 20, "chain", 2, torch.float32),
        (ALONE, 32, "tree", 6, torch.float32),
        (SHARED, 20, "deep tree", 6, torch.float32),
        (SHARED, 60, "tree", 20, torch.float16),
    ],
)
def test_trees_equal_the_definition(sizes: Sizes, nodes: int, kind: str, before: int, dtype: torch.dtype) -> None:
    """Keeps out: a node that sees a node beside its path, a decay that overflows, a pending path that is added twice, in part,
    or from a number that holds no nodes, a group's keys left by another one.
    """
    now = ssd_round(sizes, nodes, kind != "tree", dtype, seed=nodes, before=before)
    if kind == "deep tree":
        now.steps.parents_BN[:, -2:] = 3
        now = now._replace(steps=now.steps._replace(is_chain=False))
    assert not check_trees(now, TOLERANCE[dtype]).isnan().any()


@pytest.mark.parametrize(("sizes", "biased", "before"), [(ALONE, True, 6), (SHARED, False, 2), (WIDE, True, 20)])
def test_a_step_with_its_convolution_equals_the_definition(sizes: Sizes, biased: bool, before: int) -> None:
    """Keeps out: inputs of other channels, or of another end of the path, and inputs that no program keeps.  Some rows have
    fewer nodes pending than the convolution looks back, some more, some none.
    """
    now = ssd_round(sizes, 1, True, torch.float32, seed=before, before=before)
    inputs, C = now.layer.conv, sizes.C
    for number in (2, 4, 9):
        inputs.conv_PWC[number] = torch.randn(sizes.Z - 1, C)
    inputs.x_LNC[[2, 4]] = torch.randn(2, max(1, before), C)
    conv, gates = Convolution(torch.randn(sizes.Z, C), torch.randn(C) if biased else None), now.weights.gates(now.dt_TH)
    layer = copied(now.layer, DEVICE)
    on_gpu = Convolution(conv.weight_ZC.to(DEVICE), None if conv.bias_C is None else conv.bias_C.to(DEVICE))
    wide = torch.cat((now.y_TC, now.y_TC), dim=1).to(DEVICE)  # the inputs may be strided
    got = launch_convolved_step(wide[:, :C], on_gpu, on_device(gates), layer, moved(now.steps, DEVICE), StepTiles(16, 1)).cpu()
    want = convolved_tree_outputs(now.y_TC, conv, gates, now.layer, now.steps)
    torch.testing.assert_close(got, want, atol=float(2e-5 * want.abs().max()), rtol=2e-5)
    equal_memory(layer, now.layer, 2e-5)


@pytest.mark.parametrize("broken", ["query", "key", "value", "step"])
def test_a_broken_node_reaches_those_below_it_alone(broken: str) -> None:
    """Keeps out: a draft token that overflows and fails a request, which without drafts would have gone on."""
    now = ssd_round(SHARED, 20, False, torch.float32, seed=3, before=2)
    node, parents = 4, now.steps.parents_BN
    below_BN = parents == -1  # nodes that are the broken one, or below it
    below_BN[:, node] = True
    for child in range(node + 1, 20):
        below_BN[:, child] |= below_BN.gather(1, parents[:, child : child + 1])[:, 0]
    clean = tree_outputs(now.y_TC, now.weights.gates(now.dt_TH), copied(now.layer, torch.device("cpu")).rule, now.steps)
    broken_in(now, SHARED, broken, node)
    want, beside_T = check_trees(now, 2e-5), ~below_BN.flatten()
    torch.testing.assert_close(want[beside_T], clean[beside_T])
    assert beside_T.any() and want.view(*parents.shape, -1)[:, node].isnan().any(-1).all()


@pytest.mark.parametrize(
    ("sizes", "lengths", "kept", "after", "dtype", "tiles", "search", "stretches"),
    [
        (ALONE, [1, 37, 70], 2, 32, torch.float16, None, 2, None),
        (SHARED, [133, 3, 2], 0, 73, torch.float32, ChunkTiles(64, 16, 4, 1), 4, 1),
        (WIDE, [2], 0, 1, torch.float32, None, 32, None),
        (SHARED, [133, 3, 40], 0, 73, torch.float32, ChunkTiles(16, 16, 4, 1), 4, 3),
        (ALONE, [100, 33, 70], 2, 64, torch.float16, None, 2, 2),
    ],
    ids=["blocks of 32", "blocks of 64", "two tokens", "three stretches", "a stretch that ends where a state is kept"],
)
def test_parts_equal_the_definition(
    sizes: Sizes, lengths: list[int], kept: int, after: int, dtype: torch.dtype, tiles: ChunkTiles | None, search: int,
    stretches: int | None,
) -> None:  # fmt: skip
    """Keeps out: a block's border that shows, a block that is nobody's where parts are many, a state that is kept one token
    late, a part of padding that reaches a row, a token after the parts that is read, a head with another one's decay, a stretch
    that begins with another state than the one before it has left.
    """
    now = ssd_round(sizes, 2, False, dtype, seed=len(lengths))
    steps, layer, tokens = parts_of(lengths, kept, after), copied(now.layer, DEVICE), sum(lengths)
    y, dt = (torch.cat((each, each.new_full((3, each.shape[1]), torch.nan))) for each in ssd_inputs(sizes, tokens, dtype))
    gates = now.weights.gates(dt)
    got = launch_ssd_parts(y.to(DEVICE), on_device(gates), layer.rule, moved(steps, DEVICE), tiles, search, stretches).cpu()
    want = chunk_outputs(y, gates, now.layer.rule, steps)
    scale = float(TOLERANCE[dtype] * want[:tokens].abs().max())
    torch.testing.assert_close(got[:tokens], want[:tokens], atol=scale, rtol=TOLERANCE[dtype])
    equal_memory(layer, now.layer, 2e-5)
