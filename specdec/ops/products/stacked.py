"""Products with stacks of matrices in one order of sums: what heads and experts compute under an invariant policy.

Other policies take those of dense experts too, up to `MOST_STACKED` pairs an expert, and leave the rest to grouped.py's kernel
or to torch (attention/latent/mla.py, models/mixtures/products.py), whose order of sums depends on the number of rows.  All
mixtures but those of few tokens use the weighted sum.  Everything here runs on a GPU alone.

Shapes: M tokens, A experts of a token (top_k), P = M * A pairs, E experts, B matrices of a stack, K in, N out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.ops.products.numerics import INVARIANT
from specdec.ops.products.tiles.experts import StackedTiles

if TYPE_CHECKING:
    from specdec.ops.products.experts import Activation


def each_linear(x_MBK: Tensor, weight_BNK: Tensor, dtype: torch.dtype, tiles: StackedTiles | None = None) -> Tensor:
    """[M, B, N] of that dtype: row b of each token times matrix b, summed in float32 and rounded once.

    tiles: other ones than the policy's, here and below.
    """
    out_MBN = x_MBK.new_empty(*x_MBK.shape[:2], weight_BNK.shape[1], dtype=dtype)
    each_linear_into(x_MBK, weight_BNK, out_MBN, tiles)
    return out_MBN


def each_linear_into(x_MBK: Tensor, weight_BNK: Tensor, out_MBN: Tensor, tiles: StackedTiles | None = None) -> None:
    """`each_linear` into memory that need not be contiguous, but for a row's values."""
    from specdec.ops.products.kernels.experts.stacked_triton import launch_each_linear

    if x_MBK.shape[0]:
        launch_each_linear(x_MBK, weight_BNK, out_MBN, tiles or INVARIANT.stacked_tiles(x_MBK.shape[0], x_MBK.dtype))


def experts_linear(
    x: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, order_P: Tensor, counts_E: Tensor, top_k: int, *,
    activation: Activation | None, tiles: StackedTiles | None = None,
) -> Tensor:  # fmt: skip
    """Each pair's product with its expert's matrix, plus its bias.

    order_P: the indices of pairs sorted by expert, int64.  counts_E: how many pairs each expert has, int32.
    activation: of an MLP's first product, from x [M, K] to its activation [P, N], in the order of order_P; None: of its second
    product, from that, [P, K], to [P, N] in the order of the pairs.
    """
    from specdec.ops.products.kernels.experts.stacked_triton import launch_experts_linear

    tiles = tiles or INVARIANT.stacked_tiles(-(-order_P.shape[0] // weight_ENK.shape[0]), x.dtype)
    return launch_experts_linear(x, weight_ENK, bias_EN, order_P, counts_E, top_k, activation, tiles)


def weighted_sum(x: Tensor, topk_weights_MA: Tensor, places_P: Tensor | None = None) -> Tensor:
    """[M, N]: the sum of a token's A rows times their weights (float32), added up in float32 from the first to the last.

    x: [M, A, N], or rows of which places_P says which one is a pair's.  A row whose weight is 0 may hold anything.
    """
    from specdec.ops.products.kernels.experts.stacked_triton import launch_weighted_sum

    return launch_weighted_sum(x, topk_weights_MA, places_P)


def spread_rows(x_MK: Tensor, places_P: Tensor, rows: int) -> Tensor:
    """[rows, K]: x's row of each pair at the pair's place.  Nobody writes the others, nor a pair's whose place is -1."""
    from specdec.ops.products.kernels.experts.stacked_triton import launch_spread_rows

    return launch_spread_rows(x_MK, places_P, rows)
