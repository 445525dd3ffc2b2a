"""An output layer that computes the logits of some tokens alone: those of the lists whose centroids fit a state best.

Shapes: R states, H hidden, V vocabulary, C centroids, n tokens of a list, k lists that are chosen, P = k * n tokens.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from specdec.draft.assistant.config import CentroidSizes
from specdec.draft.head import NEVER
from specdec.models.linear import Linear
from specdec.models.making import made_now

WHOLE_ABOVE = 16  # threshold in states: gathering rows for more of them takes longer than a product with the whole table


class Centroids(nn.Module):
    """Which tokens get a logit.  tokens_Cn: int64, the tokens of each centroid's list; every token is in one."""

    def __init__(self, sizes: CentroidSizes, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.centroids = Linear(hidden_size, sizes.count)
        shape = sizes.count, vocab_size // sizes.count
        self.tokens_Cn = nn.Buffer(torch.zeros(shape, dtype=torch.int64, device=made_now().device))

    def forward(self, z_RH: Tensor, table: Linear) -> Tensor:
        """[R, V]: logits of the chosen lists' tokens, and NEVER for all others.  table: a row for each token."""
        chosen_Rk = cast(Tensor, self.centroids(z_RH)).topk(self.sizes.top_k, dim=-1).indices
        ids_RP = self.tokens_Cn[chosen_Rk].flatten(1)
        if len(z_RH) > WHOLE_ABOVE:
            logits_RP = cast(Tensor, table(z_RH)).gather(1, ids_RP)
        else:
            rows_RPH = table.rows(ids_RP.flatten()).unflatten(0, ids_RP.shape)
            logits_RP = (rows_RPH @ z_RH[:, :, None])[..., 0]
        return logits_RP.new_full((len(z_RH), self.tokens_Cn.numel()), NEVER).scatter_(1, ids_RP, logits_RP)
