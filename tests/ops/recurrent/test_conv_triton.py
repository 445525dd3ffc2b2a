"""The kernels of the convolution against its definition.  Under Triton's interpreter where there is no GPU."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.recurrent.made import Sizes, Weights
from toolkit.recurrent.rounds import copied, equal_memory, in_the_middle, inputs, moved, parts_of

from specdec.ops.recurrent.conv import Convolution, chunk_convolution, tree_convolution
from specdec.ops.recurrent.conv_triton import ConvTiles, launch_chunk_convolution, launch_tree_convolution

SIZES = Sizes(G=2, H=6, K=16, V=16)  # 160 channels: no power of two
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def conv_of(weights: Weights, biased: bool, silu: bool) -> Convolution:
    return Convolution(weights.conv_ZC, torch.randn_like(weights.conv_ZC[0]) if biased else None, silu)


def on_device(conv: Convolution) -> Convolution:
    weight_ZC, bias_C, silu = conv
    return Convolution(weight_ZC.to(DEVICE), None if bias_C is None else bias_C.to(DEVICE), silu)


@pytest.mark.parametrize(
    ("nodes", "chain", "dtype", "tiles", "biased", "silu"),
    [
        (1, True, torch.float16, None, True, True),
        (2, False, torch.float32, None, False, False),
        (6, True, torch.float32, None, True, False),
        (33, False, torch.float16, ConvTiles(64, 4, 8, 30), False, True),  # two programs share a row's nodes
    ],
)
def test_trees_equal_the_definition(
    nodes: int, chain: bool, dtype: torch.dtype, tiles: ConvTiles | None, biased: bool, silu: bool
) -> None:
    """Keeps out: a node that reads a neighbour in place of its parent, an input of the text or of its pending path at another
    tap, one read of a number that holds no nodes, a channel left out, a bias or SiLU nobody asked for.
    """
    now = in_the_middle(SIZES, nodes, chain, dtype, seed=nodes)
    layer = copied(now.layer, DEVICE)
    conv, x = conv_of(now.weights, biased, silu), torch.cat((now.x_TC, now.x_TC), dim=1).to(DEVICE)[:, : SIZES.C]
    got = launch_tree_convolution(x, on_device(conv), layer.conv, moved(now.steps, DEVICE), tiles).cpu()
    want = tree_convolution(now.x_TC, conv, now.layer.conv, now.steps)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    equal_memory(layer, now.layer, 0)


@pytest.mark.parametrize(
    ("lengths", "kept", "after", "dtype", "biased", "silu"),
    [
        ([1, 2, 37], 2, 16, torch.float16, True, True),
        ([20, 5, 2], 2, 1, torch.float32, False, False),
        ([1], 0, 0, torch.float32, False, True),
    ],
)
def test_parts_equal_the_definition(
    lengths: list[int], kept: int, after: int, dtype: torch.dtype, biased: bool, silu: bool
) -> None:
    """Keeps out: a part that reads its neighbour's tokens, last inputs of a short part that forget those before it, a part of
    padding that reaches a row.
    """
    now = in_the_middle(SIZES, 2, False, dtype, seed=len(lengths))
    steps = parts_of(lengths, kept, after)
    conv, layer = conv_of(Weights.random(SIZES, dtype), biased, silu), copied(now.layer, DEVICE)
    tokens = sum(lengths)
    x = torch.cat((inputs(SIZES, tokens, dtype)[0], torch.full((3, SIZES.C), torch.nan, dtype=dtype)))  # padding last
    got = launch_chunk_convolution(x.to(DEVICE), on_device(conv), layer.conv, moved(steps, DEVICE)).cpu()
    want = chunk_convolution(x, conv, now.layer.conv, steps)
    torch.testing.assert_close(got[:tokens], want[:tokens], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    equal_memory(layer, now.layer, 0)
