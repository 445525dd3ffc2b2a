"""Kimi's delta rule over trees by the kernel for Hopper GPUs, against its definition in float64."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.recurrent.kimi import KimiRound, KimiWidths, kimi_in_the_middle, kimi_tokens
from toolkit.recurrent.rounds import NUMBERS, moved, parts_of
from torch import Tensor

from specdec.limits import TRASH
from specdec.ops.recurrent.kimi.launch import KimiHopperTiles, kimi_hopper_tiles, launch_kimi_trees
from specdec.ops.recurrent.kimi.parts.launch import kimi_chunk_tiles, launch_kimi_parts
from specdec.ops.recurrent.kimi_delta import KimiGates, chunk_outputs, tree_outputs
from specdec.ops.recurrent.states import RuleStates
from specdec.ops.recurrent.trees.hopper_tiles import takes

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="a kernel for Hopper GPUs")
SIZES = KimiWidths(3, 128)


def copied(memory: RuleStates, *kind: object) -> RuleStates:
    return RuleStates(*(each.clone().to(*kind) for each in memory))


def exact(gates: KimiGates) -> KimiGates:
    """In float64, with strengths rounded as the kernels have them."""
    beta_TH = gates.b_TH.sigmoid().double()
    return KimiGates(gates.a_TC.double(), (beta_TH / (1 - beta_TH)).log(), *(each.double() for each in gates[2:]))


def equal_memory(memory: RuleStates, wide: RuleStates, tolerance: float) -> None:
    """Number 1 is trash."""
    numbers = torch.tensor([number for number in range(NUMBERS) if number != TRASH])
    for ours, theirs in zip(memory, wide, strict=True):
        own = numbers[numbers < len(theirs)]
        x, y = ours.cpu()[own].double(), theirs[own]
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4, equal_nan=True)
        x, y = x.nan_to_num(), y.nan_to_num()
        assert (x - y).norm() < tolerance * y.norm()


def check(now: KimiRound, tiles: KimiHopperTiles | None = None) -> Tensor:
    """The definition's outputs, if those of the kernel are equal, and what it leaves."""
    memory, wide = copied(now.memory, DEVICE), copied(now.memory, torch.float64)
    y, gates = now.y_TC.to(DEVICE), KimiGates(*(each.to(DEVICE) for each in now.gates))
    assert takes(y, memory, now.steps.parents_BN.shape[1])
    got = launch_kimi_trees(y, gates, memory, moved(now.steps, DEVICE), tiles=tiles).cpu()
    want = tree_outputs(now.y_TC.double(), exact(now.gates), wide, now.steps)
    torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=1e-2, equal_nan=True)
    equal_memory(memory, wide, 6e-6)
    return want


def test_tiles_cut_heads_evenly() -> None:
    """Keeps out: columns that no program computes."""
    for rows in (1, 2, 3, 32):
        for nodes in (2, 16, 17, 32, 33, 64):
            assert 128 % (16 * kimi_hopper_tiles(rows, nodes, 32).warps) == 0


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("nodes", "kind", "before", "tiles"),
    [
        (7, "chain", 6, None),
        (2, "chain", 1, KimiHopperTiles(8)),
        (16, "deep tree", 6, KimiHopperTiles(4)),
        (17, "chain", 20, KimiHopperTiles(8, 168)),
        (32, "tree", 6, KimiHopperTiles(4)),
        (32, "tree", 6, KimiHopperTiles(8)),
        (32, "tree", 20, KimiHopperTiles(8, 128, True)),
        (6, "chain", 6, KimiHopperTiles(8, 128, True)),
        (32, "tree", 6, KimiHopperTiles(8, 128, True, True)),
        (20, "chain", 20, KimiHopperTiles(8, 128, True, True)),
        (6, "chain", 2, KimiHopperTiles(8, 128, True, True)),
        (20, "tree", 6, KimiHopperTiles(4, 168)),
        (32, "chain", 2, None),
        (33, "tree", 20, None),
        (64, "chain", 6, None),
    ],
)
def test_trees_equal_the_definition(nodes: int, kind: str, before: int, tiles: KimiHopperTiles | None) -> None:
    """Keeps out: columns, channels or nodes in another order, a node that sees a node beside its path, a level left out, a
    pending path that is added in part, keys or decays that no program stores, a decay of -20 and less that overflows.
    """
    now = kimi_in_the_middle(SIZES, nodes, kind == "chain", torch.bfloat16, seed=nodes, before=before)
    if kind == "deep tree":
        now.steps.parents_BN[:, -2:] = 3
    check(now, tiles)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("nodes", [8, 20])
@pytest.mark.parametrize("broken", ["query", "key", "value", "decay", "strength"])
def test_a_broken_node_is_as_the_definition_has_it(broken: str, nodes: int) -> None:
    """Keeps out: a draft token that overflows and reaches a node beside it, through products or through the tensor cores."""
    now = kimi_in_the_middle(SIZES, nodes, False, torch.bfloat16, seed=3, before=2)
    (H, K), gates = SIZES, now.gates
    places = {
        "query": (now.y_TC, 1), "key": (now.y_TC, H * K + 1), "value": (now.y_TC, 2 * H * K + 1), "decay": (gates.a_TC, 5),
        "strength": (gates.b_TH, 0),
    }  # fmt: skip
    x, column = places[broken]
    for row in range(len(now.steps.parents_BN)):
        x[nodes * row + 4, column] = torch.inf if row % 2 and broken != "strength" else torch.nan
    assert check(now).isnan().any()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("lengths", "kept", "after", "search"),
    [([1, 37, 70], 2, 32, 2), ([200, 64, 129], 0, 73, 32), ([2], 0, 1, 32)],
    ids=["short", "long", "two tokens"],
)
def test_parts_equal_the_definition(lengths: list[int], kept: int, after: int, search: int) -> None:
    """Keeps out: a border of 8, 16 or 32 tokens at which pairs are lost or counted twice, a decay of another channel or one
    that overflows, a block that is nobody's where parts are many, a token after the parts that is read.
    """
    now = kimi_in_the_middle(SIZES, 2, False, torch.bfloat16, seed=len(lengths))
    steps, memory, wide = parts_of(lengths, kept, after), copied(now.memory, DEVICE), copied(now.memory, torch.float64)
    y, gates = kimi_tokens(SIZES, sum(lengths), torch.bfloat16)
    y, a, b = (torch.cat((each, each.new_full((3, each.shape[1]), torch.nan))) for each in (y, *gates[:2]))  # padding last
    gates = gates._replace(a_TC=a, b_TH=b)
    tiles = kimi_chunk_tiles(y.to(DEVICE), SIZES.K)._replace(search=search)
    assert tiles.hopper
    on_device = KimiGates(*(each.to(DEVICE) for each in gates))
    got = launch_kimi_parts(y.to(DEVICE), on_device, memory, moved(steps, DEVICE), tiles).cpu()
    want = chunk_outputs(y.double(), exact(gates), wide, steps)
    tokens = sum(lengths)
    torch.testing.assert_close(got[:tokens].double(), want[:tokens], atol=2e-2, rtol=2e-2)
    equal_memory(memory, wide, 6e-5)
