"""Mamba-2's rule over trees by the kernel for Hopper GPUs, against its definition there; elsewhere what can be seen."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.recurrent.made import Sizes
from toolkit.recurrent.mamba import broken_in, check_trees, ssd_round

from specdec.ops.recurrent.mamba.ssd_hopper_tiles import SsdHopperTiles, takes

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="a kernel for Hopper GPUs")
SIZES, WIDE = Sizes(G=2, H=6, K=128, V=64), Sizes(G=1, H=2, K=128, V=128)


def test_passes_that_the_kernel_takes() -> None:
    """Keeps out: a pass on another GPU."""
    now = ssd_round(SIZES, 7, True, torch.bfloat16, seed=1)
    assert now.layer.rule is not None and not takes(now.y_TC, now.layer.rule, 7)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("nodes", "kind", "before", "tiles"),
    [
        (7, "chain", 6, None),
        (2, "chain", 1, SsdHopperTiles(168)),
        (16, "deep tree", 6, SsdHopperTiles(128, True)),
        (17, "chain", 20, SsdHopperTiles(0, True)),
        (32, "tree", 6, None),
        (20, "tree", 6, SsdHopperTiles(128, True)),
        (32, "chain", 2, SsdHopperTiles()),
        (33, "tree", 20, None),
        (60, "tree", 6, SsdHopperTiles(168, True)),
        (32, "tree", 20, SsdHopperTiles(168, True)),
        (64, "chain", 6, SsdHopperTiles(168, True)),
    ],
)
@pytest.mark.parametrize("sizes", [SIZES, WIDE], ids=["heads of a group", "two blocks of columns"])
def test_trees_equal_the_definition(sizes: Sizes, nodes: int, kind: str, before: int, tiles: SsdHopperTiles | None) -> None:
    """Keeps out: columns or nodes in another order, a node that sees a node beside its path, a pending path that is added in
    part, keys that no program stores, a decay that overflows, another group's keys.
    """
    now = ssd_round(sizes, nodes, kind == "chain", torch.bfloat16, seed=nodes, before=before)
    if kind == "deep tree":
        now.steps.parents_BN[:, -2:] = 3
    assert now.layer.rule is not None and takes(now.y_TC.to(DEVICE), now.layer.rule, nodes)
    assert not check_trees(now, 1e-2, tiles).isnan().any()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("nodes", [8, 20])
@pytest.mark.parametrize("broken", ["query", "key", "value", "step"])
def test_a_broken_node_is_as_the_definition_has_it(broken: str, nodes: int) -> None:
    """Keeps out: a draft token that overflows and reaches a node beside it, through products or through the tensor cores."""
    now = ssd_round(SIZES, nodes, False, torch.bfloat16, seed=3, before=2)
    broken_in(now, SIZES, broken, 4)
    assert check_trees(now, 1e-2).isnan().any()
