"""What top-k, top-p and min-p keep of rows of logits: the border between the tokens that stay and those that go.

Top-k and top-p keep the beginning of a row's tokens in their order, by logits and, of equal ones, by ids.  So the last of them
is all that needs to be known of it.  The definition here sorts; on a GPU the kernels of border_triton.py search.  Both add
whole numbers, so neither depends on the batch; their exponentials differ by a millionth, and so may top-p's border.

Shapes: R rows, V vocabulary, W a run of it, B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.noise.floor import Filters

BEST = 2.0**40  # the weight of a row's best token; that of a token 28 below it in logits is 1


class Border(NamedTuple):
    """Kept are tokens with more than least_R, and of those with just as much the ids up to last_R; and of all of these only
    such as have lowest_R at least when they are divided by the temperature.

    least_R, lowest_R: float32.  last_R: int64.
    """

    least_R: Tensor
    last_R: Tensor
    lowest_R: Tensor

    def keeps(self, logits_RW: Tensor, scaled_RW: Tensor, first: int = 0) -> Tensor:
        """[R, W] bool: which tokens are kept.  scaled_RW: the logits divided by the temperature.  first: the run's first id."""
        id_W = torch.arange(first, first + logits_RW.shape[1], dtype=torch.int64, device=logits_RW.device)
        least_R1 = self.least_R[:, None]
        stays_RW = (logits_RW > least_R1) | (logits_RW == least_R1) & (id_W <= self.last_R[:, None])
        return stays_RW & (scaled_RW >= self.lowest_R[:, None])


def borders(logits_RV: Tensor, filters: Filters) -> Border:
    """The border of each row.

    logits_RV: of the whole vocabulary, before they are divided by the temperature.  A sequence's rows are adjacent, equally
    many for each.  Of a greedy sequence least_R and last_R keep all tokens.

    top-p keeps the smallest set of the tokens that top-k keeps whose probability reaches top_p.
    """
    if use_kernels(logits_RV):
        from specdec.ops.noise.border_triton import launch_borders

        return launch_borders(logits_RV, filters)
    rows, V = filters.expand_rows(len(logits_RV)), logits_RV.shape[1]
    sorted_RV, order_RV = (logits_RV.float() + 0.0).sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(V, dtype=torch.int64, device=logits_RV.device)
    beyond_k_RV = (rank_V >= rows.top_k_B[:, None]) & (rows.top_k_B > 0)[:, None]
    scaled_RV = sorted_RV / rows.heat_B[:, None]
    # Sums of integers are exact in any order.  A sum of floats has an order that depends on the number of rows, by which
    # a token at top-p's border could depend on the batch.
    weights_RV = ((scaled_RV - scaled_RV[:, :1]).exp() * BEST).long().masked_fill(beyond_k_RV, 0)
    sums_RV = weights_RV.cumsum(-1)
    wanted_R1 = rows.top_p_B[:, None] * sums_RV[:, -1:].double()
    beyond_p_RV = (sums_RV - weights_RV >= wanted_R1) & (rows.top_p_B < 1)[:, None]
    goes_RV = (beyond_k_RV | beyond_p_RV) & (rows.temperature_B > 0)[:, None]
    last_R1 = (V - goes_RV.sum(-1, keepdim=True) - 1).clamp(min=0)
    border = sorted_RV.gather(1, last_R1)[:, 0], order_RV.gather(1, last_R1)[:, 0]
    return Border(*border, lowest(logits_RV.amax(-1), filters))


def lowest(largest_R: Tensor, filters: Filters) -> Tensor:
    """[R] float32: the least logit, divided by the temperature, that min-p keeps; -inf without min-p."""
    rows = filters.expand_rows(len(largest_R))
    return largest_R.float() / rows.heat_B + rows.min_p_B.double().log().float()


def lowest_alone(largest_R: Tensor, filters: Filters, size: int) -> Border:
    """The border of rows that have no other filter than min-p.  size: of the vocabulary."""
    least_R = torch.full_like(largest_R, -torch.inf, dtype=torch.float32)
    return Border(least_R, torch.full_like(largest_R, size, dtype=torch.int64), lowest(largest_R, filters))
