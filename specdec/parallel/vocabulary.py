"""Tokens of a vocabulary whose logits lie on several ranks, each of which has computed a run of them.

No rank ever holds whole logits: ranks exchange their best tokens, and the best of these are the best of all.  Ties go to the
lower id, as on one rank, whichever ranks they lie on.  The last ranks' runs may be shorter than the others', or empty.
This module knows no model.

Shapes: R rows, W a rank's run of the vocabulary, k best, N ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.noise.floor import bins_of, floor_of
from specdec.ops.noise.gumbel import Noise, perturb
from specdec.ops.topk import greedy_tokens, stable_topk, top_tokens, with_offsets
from specdec.parallel.group import Group


class Vocabulary(NamedTuple):
    """A rank's run of a vocabulary: `own` ids from `first` on, of `size` in all.  group: the ranks that hold the others."""

    first: int
    own: int
    size: int
    group: Group

    @classmethod
    def of(cls, size: int, group: Group) -> Vocabulary:
        """The run of this rank, as `Shard.piece` cuts it."""
        most = -(-size // group.size)
        first = min(group.rank * most, size)
        return cls(first, min(most, size - first), size, group)

    def best(self, logits_RW: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest of each row over all ranks: (values [R, k], ids [R, k] int64), best first, ties to the lower id.

        logits_RW: float32 of this rank's ids.  NaN counts as the largest value.
        """
        most = min(k, -(-self.size // self.group.size))
        values_Rk = logits_RW.new_full((len(logits_RW), most), -torch.inf)
        ids_Rk = torch.full_like(values_Rk, self.size, dtype=torch.int64)  # of no token: after all others
        if held := min(most, self.own):
            values_Rk[:, :held], places = stable_topk(torch.where(logits_RW.isnan(), torch.nan, logits_RW), held)  # no -NaN
            ids_Rk[:, :held] = places + self.first
        # Ranks are gathered in the order of their ids, so a stable sort leaves equal values in that order too.
        values_RX = self.group.gather(values_Rk).transpose(0, 1).flatten(1)
        ids_RX = self.group.gather(ids_Rk).transpose(0, 1).flatten(1)
        order_Rk = values_RX.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return values_RX.gather(1, order_Rk), ids_RX.gather(1, order_Rk)

    def largest(self, logits_RW: Tensor) -> Tensor:
        """[R]: the largest logit of each row, NaN if there is one."""
        return logits_RW.amax(-1) if self.group.size == 1 else self.best(logits_RW.float(), 1)[0][:, 0]

    def greedy(
        self, logits_RW: Tensor, offsets_V: Tensor | None = None, *, finite: bool = False, noise: Noise | None = None
    ) -> Tensor:
        """[R] int64: as `greedy_tokens` of whole logits.  offsets_V: of the whole vocabulary."""
        if self.group.size == 1:
            return greedy_tokens(logits_RW, offsets_V, finite=finite, noise=noise)
        values_R1, ids_R1 = self.best(self._perturbed(logits_RW, noise, offsets_V), 1)
        tokens_R = with_offsets(ids_R1[:, 0], offsets_V)
        return torch.where(values_R1[:, 0].isfinite(), tokens_R, -1) if finite else tokens_R

    def top(
        self,
        logits_RW: Tensor,
        k: int,
        offsets_V: Tensor | None = None,
        out: tuple[Tensor, Tensor] | None = None,
        noise: Noise | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities [R, k] float32, ids [R, k] int64): as `top_tokens` of whole logits.  out: memory for the two."""
        if self.group.size == 1:
            return top_tokens(logits_RW, k, offsets_V, out, noise)
        logits_RW = self._perturbed(logits_RW, noise, offsets_V)
        values_Rk, ids_Rk = self.best(logits_RW, k)
        best_R1 = values_Rk[:, :1]
        total_R = self.group.sum((logits_RW - best_R1).exp().sum(-1))
        result = (values_Rk - best_R1) - total_R.log()[:, None], with_offsets(ids_Rk, offsets_V)
        return result if out is None else (out[0].copy_(result[0]), out[1].copy_(result[1]))

    def part(self, logits_RV: Tensor) -> Tensor:
        """[R, W]: this rank's run of whole logits."""
        return logits_RV[:, self.first : self.first + self.own]

    def _perturbed(self, logits_RW: Tensor, noise: Noise | None, offsets_V: Tensor | None) -> Tensor:
        """[R, W] float32: this rank's logits with the noise of its own ids, if there is any."""
        if noise is None:
            return logits_RW.float()
        floor_R = None
        if noise.filters is not None:
            largest_R = self.largest(logits_RW).float()
            floor_R = floor_of(self.group.sum(bins_of(logits_RW, largest_R, noise.filters)), largest_R, noise.filters)
        return perturb(logits_RW, noise, offsets_V, self.first, floor_R)

    def whole(self, logits_RW: Tensor) -> Tensor:
        """[R, V]: the logits of all ranks."""
        if self.group.size == 1:
            return logits_RW
        most = -(-self.size // self.group.size)
        padded_RW = F.pad(logits_RW, (0, most - self.own))
        return self.group.gather(padded_RW).transpose(0, 1).flatten(1)[:, : self.size]
