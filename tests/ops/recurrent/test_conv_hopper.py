"""The convolution over trees by the kernel for Hopper GPUs, against its definition and against Triton's kernel, bit by bit."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.recurrent.made import Sizes
from toolkit.recurrent.rounds import copied, equal_memory, in_the_middle, moved

from specdec.ops.recurrent.conv import Convolution, tree_convolution
from specdec.ops.recurrent.conv_triton import ConvHopperTiles, launch_tree_convolution

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SIZES = Sizes(G=2, H=16, K=128, V=64)  # 1,536 channels


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize(
    ("nodes", "chain", "tiles", "biased", "silu"),
    [
        (1, True, ConvHopperTiles(1, 1, 1), True, True),
        (6, True, ConvHopperTiles(1, 1, 4), True, False),
        (20, False, ConvHopperTiles(1, 2, 4), True, True),
        (32, False, ConvHopperTiles(2, 2, 8), False, True),
        (5, False, ConvHopperTiles(1, 4, 4), False, False),  # three programs for five nodes
        (60, False, ConvHopperTiles(1, 4, 4), True, True),
    ],
)
def test_trees_equal_the_definition(nodes: int, chain: bool, tiles: ConvHopperTiles, biased: bool, silu: bool) -> None:
    """Keeps out: a pair's numbers in the other order, an ancestor in another program's nodes, a last input of the text at
    another tap, a node left out where groups or turns do not divide them, sums in another order than Triton's.
    """
    now = in_the_middle(SIZES, nodes, chain, torch.bfloat16, seed=nodes)
    weight_ZC = now.weights.conv_ZC
    conv = Convolution(weight_ZC, torch.randn_like(weight_ZC[0]) if biased else None, silu)
    here = Convolution(weight_ZC.to(DEVICE), None if conv.bias_C is None else conv.bias_C.to(DEVICE), silu)
    x, steps = torch.cat((now.x_TC, now.x_TC), dim=1).to(DEVICE)[:, : SIZES.C], moved(now.steps, DEVICE)
    layer, other = copied(now.layer, DEVICE), copied(now.layer, DEVICE)
    got = launch_tree_convolution(x, here, layer.conv, steps, tiles).cpu()
    assert torch.equal(got, launch_tree_convolution(x, here, other.conv, steps).cpu())
    torch.testing.assert_close(got, tree_convolution(now.x_TC, conv, now.layer.conv, now.steps), atol=1e-2, rtol=1e-2)
    equal_memory(layer, now.layer, 0)
