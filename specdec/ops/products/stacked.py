"""Products with stacks of matrices in one order of sums: what heads and experts compute under an invariant policy.

Other policies leave these products to torch (attention/latent/mla.py, models/experts.py), whose order of sums depends on the
number of rows; quantised experts use the weighted sum too.  Everything here runs on a GPU alone.

Shapes: T tokens, K experts of a token, P = T * K pairs, E experts, B matrices of a stack, I in, O out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.ops.products.numerics import INVARIANT
from specdec.ops.products.tiles.experts import StackedTiles


def each_linear(x_TBI: Tensor, weight_BOI: Tensor, dtype: torch.dtype, tiles: StackedTiles | None = None) -> Tensor:
    """[T, B, O] of that dtype: row b of each token times matrix b, summed in float32 and rounded once.

    tiles: other ones than the policy's, here and below.
    """
    out_TBO = x_TBI.new_empty(*x_TBI.shape[:2], weight_BOI.shape[1], dtype=dtype)
    each_linear_into(x_TBI, weight_BOI, out_TBO, tiles)
    return out_TBO


def each_linear_into(x_TBI: Tensor, weight_BOI: Tensor, out_TBO: Tensor, tiles: StackedTiles | None = None) -> None:
    """`each_linear` into memory that need not be contiguous, but for a row's numbers."""
    from specdec.ops.products.kernels.experts.stacked_triton import launch_each_linear

    if x_TBI.shape[0]:
        launch_each_linear(x_TBI, weight_BOI, out_TBO, tiles or INVARIANT.stacked_tiles(x_TBI.shape[0]))


def experts_linear(
    x: Tensor, weight_EOI: Tensor, order_P: Tensor, counts_E: Tensor, top_k: int, *, gated: bool,
    tiles: StackedTiles | None = None,
) -> Tensor:  # fmt: skip
    """Each pair's product with its expert's matrix.  The product of an MLP's first layer is gated, and that of its second not.

    order_P: the numbers of pairs sorted by expert, int64.  counts_E: how many pairs each expert has, int32.  top_k: K.
    Gated: from x [T, I] to silu(gate) * up, [P, O], in the order of order_P.  Else from that, [P, I], to [P, O] in the order of
    the pairs' numbers.
    """
    from specdec.ops.products.kernels.experts.stacked_triton import launch_experts_linear

    tiles = tiles or INVARIANT.stacked_tiles(-(-order_P.shape[0] // weight_EOI.shape[0]))
    return launch_experts_linear(x, weight_EOI, order_P, counts_E, top_k, gated, tiles)


def weighted_sum(x_TKO: Tensor, topk_weights_TK: Tensor) -> Tensor:
    """[T, O]: the sum of a token's K rows times their weights (float32), added up in float32 from the first to the last."""
    from specdec.ops.products.kernels.experts.stacked_triton import launch_weighted_sum

    return launch_weighted_sum(x_TKO, topk_weights_TK)
