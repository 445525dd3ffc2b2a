"""The kernels of Kimi's delta rule against its definition.  Under Triton's interpreter where there is no GPU."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.recurrent.kimi import KimiWidths, kimi_in_the_middle, kimi_tokens
from toolkit.recurrent.rounds import NUMBERS, moved, parts_of
from torch import Tensor

from specdec.limits import TRASH
from specdec.ops.recurrent.kimi.launch import launch_kimi_trees
from specdec.ops.recurrent.kimi.parts.launch import KimiChunkTiles, kimi_chunk_tiles, launch_kimi_parts
from specdec.ops.recurrent.kimi_delta import KimiGates, chunk_outputs, tree_outputs
from specdec.ops.recurrent.states import RuleStates

THREE, TWO = KimiWidths(3, 16), KimiWidths(2, 32)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def on_device(gates: KimiGates) -> KimiGates:
    return KimiGates(*(each.to(DEVICE) for each in gates))


def copied(memory: RuleStates) -> RuleStates:
    return RuleStates(*(each.clone().to(DEVICE) for each in memory))


def equal_memory(got: RuleStates, want: RuleStates, tolerance: float) -> None:
    """But for number 1, which is trash.  What nobody has written is still NaN."""
    kept = [number for number in range(NUMBERS) if number != TRASH]
    for ours, theirs in zip(got, want, strict=True):
        own = kept[: len(theirs) - 1]
        torch.testing.assert_close(ours.cpu()[own], theirs[own], atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize(
    ("sizes", "nodes", "kind", "before", "dtype"),
    [
        (THREE, 1, "chain", 1, torch.float16),
        (TWO, 1, "chain", 6, torch.float32),
        (TWO, 6, "chain", 6, torch.float16),
        (THREE, 7, "tree", 6, torch.float32),
        (THREE, 32, "chain", 2, torch.float32),
        (TWO, 32, "tree", 6, torch.float32),
        (THREE, 20, "deep tree", 6, torch.float32),
        (THREE, 60, "tree", 20, torch.float16),
        (TWO, 70, "deep tree", 6, torch.float32),
    ],
)
def test_trees_equal_the_definition(sizes: KimiWidths, nodes: int, kind: str, before: int, dtype: torch.dtype) -> None:
    """Keeps out: a node that sees a node beside its path, a level of the tree or a border of a chain left out, a decay of
    another channel or one that overflows, a pending path that is added twice, in part, or from a number that holds no nodes.
    """
    now = kimi_in_the_middle(sizes, nodes, kind != "tree", dtype, seed=nodes, before=before)
    steps, memory = now.steps, copied(now.memory)
    if kind == "deep tree":
        steps.parents_BN[:, -2:] = 3
        steps = steps._replace(is_chain=False)
    got = launch_kimi_trees(now.y_TC.to(DEVICE), on_device(now.gates), memory, moved(steps, DEVICE)).cpu()
    want = tree_outputs(now.y_TC, now.gates, now.memory, steps)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    equal_memory(memory, now.memory, 1e-5)


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize(("nodes", "chain"), [(8, False), (20, False), (20, True)])
@pytest.mark.parametrize("broken", ["query", "key", "value", "decay", "strength"])
def test_a_broken_node_reaches_those_below_it_alone(broken: str, nodes: int, chain: bool) -> None:
    """Keeps out: a draft token that overflows and fails a request, which without drafts would have gone on."""
    now = kimi_in_the_middle(TWO, nodes, chain, torch.float32, seed=3, before=2)
    node, parents, (H, K) = 4, now.steps.parents_BN, TWO
    below_BN = parents == -1  # nodes that are the broken one, or below it
    below_BN[:, node] = True
    for child in range(node + 1, nodes):
        below_BN[:, child] |= below_BN.gather(1, parents[:, child : child + 1])[:, 0]
    y, a, b = now.y_TC.clone(), now.gates.a_TC.clone(), now.gates.b_TH.clone()
    clean = tree_outputs(y, now.gates, RuleStates(*(each.clone() for each in now.memory)), now.steps)
    places: dict[str, tuple[Tensor, int]] = {
        "query": (y, 1), "key": (y, H * K + 1), "value": (y, 2 * H * K + 1), "decay": (a, 5), "strength": (b, 0),
    }  # fmt: skip
    for row in range(len(parents)):
        x, column = places[broken]
        x[nodes * row + node, column] = torch.inf if row % 2 and broken != "strength" else torch.nan
    gates, memory = now.gates._replace(a_TC=a, b_TH=b), copied(now.memory)
    got = launch_kimi_trees(y.to(DEVICE), on_device(gates), memory, moved(now.steps, DEVICE)).cpu()
    want = tree_outputs(y, gates, now.memory, now.steps)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, equal_nan=True)
    equal_memory(memory, now.memory, 1e-5)
    beside_T = ~below_BN.flatten()
    torch.testing.assert_close(want[beside_T], clean[beside_T])
    assert beside_T.any() and want.view(*parents.shape, -1)[:, node].isnan().any(-1).all()


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("sizes", "lengths", "kept", "after", "dtype", "tiles", "search"),
    [
        (THREE, [1, 37, 70], 2, 32, torch.float16, None, 2),
        (TWO, [133, 3, 2], 0, 73, torch.float32, KimiChunkTiles(64, 16, 4, 1, 4, 16), 4),
        (TWO, [2], 0, 1, torch.float32, None, 32),
    ],
    ids=["blocks of 32", "blocks of 64", "two tokens"],
)
def test_parts_equal_the_definition(
    sizes: KimiWidths, lengths: list[int], kept: int, after: int, dtype: torch.dtype, tiles: KimiChunkTiles | None, search: int
) -> None:  # fmt: skip
    """Keeps out: a block's border that shows, a block that is nobody's where parts are many, a state that is kept one token
    late, a part of padding that reaches a row, a token after the parts that is read.
    """
    now = kimi_in_the_middle(sizes, 2, False, dtype, seed=len(lengths))
    steps, memory, tokens = parts_of(lengths, kept, after), copied(now.memory), sum(lengths)
    y, gates = kimi_tokens(sizes, tokens, dtype)
    y, a, b = (torch.cat((each, each.new_full((3, each.shape[1]), torch.nan))) for each in (y, *gates[:2]))  # padding last
    gates = gates._replace(a_TC=a, b_TH=b)
    own = (tiles or kimi_chunk_tiles(y, sizes.K))._replace(search=search)
    got = launch_kimi_parts(y.to(DEVICE), on_device(gates), memory, moved(steps, DEVICE), own).cpu()
    want = chunk_outputs(y, gates, now.memory, steps)
    torch.testing.assert_close(got[:tokens], want[:tokens], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    equal_memory(memory, now.memory, 2e-5)
