"""What top-k, top-p and min-p keep of rows of logits: the cutoff between the tokens that stay and those that go.

Top-k and top-p keep the beginning of a row's tokens in their order, by logits and, of equal ones, by ids.  So the last of them
is all that needs to be known of it.  The definition here sorts; on a GPU the kernels of cutoff_triton.py search.  Both add
whole numbers, so neither depends on the batch; their exponentials differ by a millionth, and so may top-p's cutoff.

Shapes: R rows, V vocabulary, W a run of it, B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.noise.filters import Filters

WEIGHT_OF_BEST = 2.0**40  # the weight of a row's best token; that of a token 28 below it in logits is 1


class Cutoff(NamedTuple):
    """Top-k and top-p keep the tokens whose logit is above logit_R, and of those at logit_R the ids up to last_id_R.  Of these,
    min-p keeps the tokens whose logit divided by the temperature is at least min_scaled_R.

    logit_R, min_scaled_R: float32.  last_id_R: int64.
    """

    logit_R: Tensor
    last_id_R: Tensor
    min_scaled_R: Tensor

    def keeps(self, logits_RW: Tensor, scaled_RW: Tensor, first: int = 0) -> Tensor:
        """[R, W] bool: which tokens are kept.  scaled_RW: the logits divided by the temperature.  first: the run's first id."""
        id_W = torch.arange(first, first + logits_RW.shape[1], dtype=torch.int64, device=logits_RW.device)
        logit_R1 = self.logit_R[:, None]
        stays_RW = (logits_RW > logit_R1) | (logits_RW == logit_R1) & (id_W <= self.last_id_R[:, None])
        return stays_RW & (scaled_RW >= self.min_scaled_R[:, None])


def cutoffs(logits_RV: Tensor, filters: Filters) -> Cutoff:
    """The cutoff of each row.

    logits_RV: of the whole vocabulary, before they are divided by the temperature.  A sequence's rows are adjacent, equally
    many for each.  Of a greedy sequence logit_R and last_id_R keep all tokens.

    top-p keeps the smallest set of the tokens that top-k keeps whose probability reaches top_p.
    """
    if use_kernels(logits_RV):
        from specdec.ops.noise.cutoff_triton import launch_cutoffs

        return launch_cutoffs(logits_RV, filters)
    rows, V = filters.expand_rows(len(logits_RV)), logits_RV.shape[1]
    sorted_RV, order_RV = (logits_RV.float() + 0.0).sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(V, dtype=torch.int64, device=logits_RV.device)
    beyond_k_RV = (rank_V >= rows.top_k_B[:, None]) & (rows.top_k_B > 0)[:, None]
    scaled_RV = sorted_RV / rows.safe_temperature_B[:, None]
    # Sums of integers are exact in any order.  A sum of floats has an order that depends on the number of rows, by which
    # a token at top-p's cutoff could depend on the batch.
    weights_RV = ((scaled_RV - scaled_RV[:, :1]).exp() * WEIGHT_OF_BEST).long().masked_fill(beyond_k_RV, 0)
    sums_RV = weights_RV.cumsum(-1)
    wanted_R1 = rows.top_p_B[:, None] * sums_RV[:, -1:].double()
    beyond_p_RV = (sums_RV - weights_RV >= wanted_R1) & (rows.top_p_B < 1)[:, None]
    goes_RV = (beyond_k_RV | beyond_p_RV) & (rows.temperature_B > 0)[:, None]
    last_R1 = (V - goes_RV.sum(-1, keepdim=True) - 1).clamp(min=0)
    cutoff = sorted_RV.gather(1, last_R1)[:, 0], order_RV.gather(1, last_R1)[:, 0]
    return Cutoff(*cutoff, min_scaled(logits_RV.amax(-1), filters))


def min_scaled(largest_R: Tensor, filters: Filters) -> Tensor:
    """[R] float32: the least logit, divided by the temperature, that min-p keeps; -inf without min-p."""
    rows = filters.expand_rows(len(largest_R))
    return largest_R.float() / rows.safe_temperature_B + rows.min_p_B.double().log().float()


def min_p_cutoffs(largest_R: Tensor, filters: Filters, size: int) -> Cutoff:
    """The cutoff of rows that have no other filter than min-p.  size: of the vocabulary."""
    logit_R = torch.full_like(largest_R, -torch.inf, dtype=torch.float32)
    return Cutoff(logit_R, torch.full_like(largest_R, size, dtype=torch.int64), min_scaled(largest_R, filters))
