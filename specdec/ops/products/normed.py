"""A residual sum and its norm between two products, without a launch of their own.

A decode step adds what a block has computed to the residual stream, norms the sum, and multiplies it with the next block's
weights.  A norm divides each row by its root mean square, and that can come after the next product:
(x / rms) W^T = (x W^T) / rms.  So where both products run linear_hopper.py's kernel, the first one's programs add their tiles
to the stream, multiply with the norm's weight and leave sums of squares; the second one's add up the squares and divide.

`Product` and `Undivided` stand for tensors on that way, and give them to whoever needs them.  Each number is rounded as often
as with a norm's own launch: the sum, and what is multiplied.

Shapes: T rows, I in, H hidden size, S tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.norm import rms_norm
from specdec.ops.products.linear import gated_linear, linear, tiles_of
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.products.tiles import ProductTiles

MOST_ROWS = 8  # threshold: with more rows, what the products' programs do for a norm takes longer than its launch


class Product(NamedTuple):
    """`linear(x, weight, bias)`, which nobody has computed yet, because its reader may add it to something.

    Its kernel reads x where it lies, so nobody may write there before the product is computed.
    """

    x_TI: Tensor
    weight_HI: Tensor
    bias_H: Tensor | None
    numerics: Numerics

    def tensor(self) -> Tensor:
        return linear(*self)


class Undivided(NamedTuple):
    """A norm whose rows have not been divided by their root mean squares.

    total_TH: what is normed.  scaled_TH: the same times the norm's weight.
    squares_ST: float32; a row's sum of squares is the sum over S.
    """

    total_TH: Tensor
    scaled_TH: Tensor
    squares_ST: Tensor
    weight_H: Tensor
    eps: float

    def tensor(self) -> Tensor:
        """The norm, computed from its beginning."""
        return rms_norm(self.total_TH, self.weight_H, self.eps)


class Reader(NamedTuple):
    """The product that is to read a norm.  gated: whether its weight holds gate and up rows."""

    weight: Tensor
    gated: bool
    numerics: Numerics = FAST


def computed(x: Tensor | Product | Undivided) -> Tensor:
    return x if isinstance(x, Tensor) else x.tensor()


def product_later(x: Tensor, weight_HI: Tensor, bias_H: Tensor | None, numerics: Numerics) -> Product | None:
    """What stands for the product; None where its kernel can't add it to a residual stream."""
    return None if _tiles(x, weight_HI, False, numerics) is None else Product(x, weight_HI, bias_H, numerics)


def add_undivided(
    x_TH: Tensor, delta: Product, weight_H: Tensor, eps: float, reader: Reader
) -> tuple[Tensor, Undivided] | None:
    """`norm.add_rms_norm`, of a product and for a reader.  None where the reader's kernel can't divide."""
    tiles = _tiles(delta.x_TI, delta.weight_HI, False, delta.numerics)
    if tiles is None or not x_TH.is_contiguous() or x_TH.dtype != delta.x_TI.dtype or weight_H.dtype != x_TH.dtype:
        return None
    if _tiles(x_TH, reader.weight, reader.gated, reader.numerics) is None:
        return None
    from specdec.ops.products.linear_hopper import Added, launch_hopper_linear

    sums = -(-delta.weight_HI.shape[0] // tiles.block_o)
    squares_ST = torch.empty(sums, len(x_TH), dtype=torch.float32, device=x_TH.device)
    added = Added(x_TH, torch.empty_like(x_TH), weight_H, squares_ST)
    scaled_TH = launch_hopper_linear(delta.x_TI, delta.weight_HI, delta.bias_H, False, tiles, added)
    return added.total_TO, Undivided(added.total_TO, scaled_TH, squares_ST, weight_H, eps)


def normed_linear(x: Undivided, weight_OI: Tensor, bias_O: Tensor | None, gated: bool, numerics: Numerics) -> Tensor:
    """`linear`, or `gated_linear`, of a norm."""
    tiles = _tiles(x.scaled_TH, weight_OI, gated, numerics)
    if tiles is None:
        return (gated_linear if gated else linear)(x.tensor(), weight_OI, bias_O, numerics)
    from specdec.ops.products.linear_hopper import Squares, launch_hopper_linear

    return launch_hopper_linear(x.scaled_TH, weight_OI, bias_O, gated, tiles, squares=Squares(x.squares_ST, x.eps))


def _tiles(x: Tensor, weight: Tensor, gated: bool, numerics: Numerics) -> ProductTiles | None:
    """The tiles of linear_hopper.py's kernel; None where another one would run, or its ends don't know norms.

    In float16, rows that have not been divided might be too large.
    """
    if numerics.is_invariant or x.dtype != torch.bfloat16 or x.dim() != 2 or not 0 < x.shape[0] <= MOST_ROWS:
        return None
    tiles = tiles_of(x, weight, gated, numerics)
    return tiles if tiles is not None and tiles.lag >= 0 else None
