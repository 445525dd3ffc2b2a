"""Tokens of a vocabulary whose logits lie on several ranks, each of which has computed a run of them.

Ranks exchange their best tokens, and the best of these are the best of all; filters (top-k, top-p) alone need whole logits.
Ties go to the lower id, as on one rank, whichever ranks they lie on.  The last ranks' runs may be shorter than the others', or
empty.
This module knows no model.

Shapes: R rows, W a rank's run of the vocabulary, k best, N ranks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.noise.approximate_cutoff import bins_of, cutoffs_of_bins
from specdec.ops.noise.gumbel import Noise, perturb
from specdec.ops.topk import best_logprobs, greedy_tokens, stable_topk, top_tokens, with_offsets
from specdec.parallel.group import Group

if TYPE_CHECKING:
    from specdec.ops.topk_triton import Scan


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

    def greedy(
        self, logits_RW: Tensor, offsets_V: Tensor | None = None, *, finite: bool = False, noise: Noise | None = None
    ) -> Tensor:
        """[R] int64: as `greedy_tokens` of whole logits.  offsets_V: of the whole vocabulary."""
        if self.group.size == 1:
            return greedy_tokens(logits_RW, offsets_V, finite=finite, noise=noise)
        if self.use_kernels(logits_RW, 1):
            from specdec.ops.topk_triton import launch_greedy_tokens

            return launch_greedy_tokens(logits_RW, offsets_V, finite, self.scan(noise, offsets_V))
        values_R1, ids_R1, _ = self._best(self._perturbed(logits_RW, noise, offsets_V), 1)
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
        if self.use_kernels(logits_RW, k):
            from specdec.ops.topk_triton import launch_top_tokens

            return launch_top_tokens(logits_RW, k, offsets_V, out, self.scan(noise, offsets_V))
        values_Rk, ids_Rk, total_R1 = self._best(self._perturbed(logits_RW, noise, offsets_V), k)
        result = (values_Rk - values_Rk[:, :1]) - total_R1, with_offsets(ids_Rk, offsets_V)
        return result if out is None else (out[0].copy_(result[0]), out[1].copy_(result[1]))

    def best(self, logits_RW: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest of each row: (values [R, k] float32, ids [R, k] int64), best first, ties to the lower id.

        NaN counts as the largest value.
        """
        if self.group.size > 1:
            return self._best(logits_RW, k)[:2]
        logits_RW = logits_RW.float()
        return stable_topk(torch.where(logits_RW.isnan(), torch.nan, logits_RW), k)

    def largest(self, logits_RW: Tensor) -> Tensor:
        """[R]: the largest logit of each row, NaN if there is one."""
        if self.group.size == 1:
            return logits_RW.amax(-1)
        own_R = logits_RW.amax(-1) if self.own else logits_RW.new_full(logits_RW.shape[:1], -torch.inf)
        return self.group.all_gather(own_R).amax(0)

    def best_logprobs(self, logits_RW: Tensor) -> tuple[Tensor, Tensor]:
        """(the largest logit of each row, its log-probability), [R, 1] float32 each, in one order of sums: see topk.py."""
        if self.group.size == 1:
            return logits_RW.amax(-1, keepdim=True).float(), best_logprobs(logits_RW)
        own_R2 = logits_RW.new_full((len(logits_RW), 2), -torch.inf, dtype=torch.float32)
        if self.own:
            own_R2 = torch.cat((logits_RW.amax(-1, keepdim=True).float(), best_logprobs(logits_RW)), dim=1)
        best_NR, logprob_NR = self.group.all_gather(own_R2.double()).unbind(-1)
        best_R = best_NR.amax(0)
        totals_NR = torch.where(best_NR == -torch.inf, 0.0, (best_NR - best_R - logprob_NR).exp())
        total_R = sum(totals_NR.unbind(0)[1:], start=totals_NR[0])  # torch's sum may have another order for other R
        return best_R[:, None].float(), -total_R[:, None].log().float()

    def use_kernels(self, logits_RW: Tensor, k: int) -> bool:
        """Whether kernels go on with what `scan` finds.  Several ranks need equal runs for that, so that all find as much."""
        return use_kernels(logits_RW) and (self.group.size == 1 or (self.size % self.group.size == 0 and k <= self.own))

    def scan(self, noise: Noise | None = None, offsets_V: Tensor | None = None) -> Scan:
        """What scans the logits of all ranks on a GPU.  Each rank gets what all have found, from one exchange.

        noise: added to the logits before; offsets_V goes with it.
        """
        from specdec.ops.topk_triton import noisy_scan

        if self.group.size == 1:
            return noisy_scan(noise, offsets_V)
        from specdec.parallel.scan_triton import launch_scan_ranks

        scan = partial(launch_scan_ranks, gather=self.group.all_gather, rank=self.group.rank)
        if noise is None:
            return scan
        return lambda logits_RW, k, softmax: scan(self._perturbed(logits_RW, noise, offsets_V), k, softmax)

    def _perturbed(self, logits_RW: Tensor, noise: Noise | None, offsets_V: Tensor | None) -> Tensor:
        """This rank's logits, in float32 with the noise of its own ids if there is any."""
        if noise is None:
            return logits_RW
        cutoff_R = None
        if noise.filters is not None:
            largest_R = self.largest(logits_RW).float()
            cutoff_R = cutoffs_of_bins(
                self.group.all_reduce(bins_of(logits_RW, largest_R, noise.filters)), largest_R, noise.filters
            )
        return perturb(logits_RW, noise, offsets_V, self.first, cutoff_R)

    def _best(self, logits_RW: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row over all ranks: the k largest values [R, k] float32, best first, their ids [R, k] int64, and [R, 1] the
        logarithm of the sum of all exponentials over the largest.  Ties go to the lower id.

        NaN counts as the largest value.
        """
        logits_RW = logits_RW.float()
        most, held = min(k, -(-self.size // self.group.size)), min(k, self.own)
        values_Rk = logits_RW.new_full((len(logits_RW), most), -torch.inf)
        ids_Rk = torch.full_like(values_Rk, self.size, dtype=torch.int64)  # of no token: after all others
        total_R1 = torch.full_like(values_Rk[:, :1], -torch.inf)
        if held:
            values_Rk[:, :held], places = stable_topk(torch.where(logits_RW.isnan(), torch.nan, logits_RW), held)  # no -NaN
            ids_Rk[:, :held] = places + self.first
            total_R1 = logits_RW.logsumexp(-1, keepdim=True)
        # One exchange, of numbers that hold all exactly.  Ranks are gathered in the order of their ids, so a stable sort leaves
        # equal values in that order too.
        found_NRX = self.group.all_gather(torch.cat((values_Rk.double(), ids_Rk.double(), total_R1.double()), dim=1))
        values_RX, ids_RX = (found_NRX[..., i * most : (i + 1) * most].transpose(0, 1).flatten(1) for i in range(2))
        order_Rk = values_RX.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        values_Rk = values_RX.gather(1, order_Rk).float()
        total_R1 = found_NRX[..., -1].logsumexp(0)[:, None].float()
        # Of a rank that is lost there may be anything, which must not become an index beyond the vocabulary.
        ids_Rk = ids_RX.gather(1, order_Rk).nan_to_num(0.0).clamp(0, self.size - 1).long()
        return values_Rk, ids_Rk, total_R1 - values_Rk[:, :1]

    def whole(self, logits_RW: Tensor) -> Tensor:
        """[R, V]: the logits of all ranks."""
        if self.group.size == 1:
            return logits_RW
        most = -(-self.size // self.group.size)
        padded_RW = F.pad(logits_RW, (0, most - self.own))
        return self.group.all_gather(padded_RW).transpose(0, 1).flatten(1)[:, : self.size]
