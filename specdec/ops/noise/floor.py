"""Which logit top-k, top-p and min-p leave as the least, found without sorting.

A drafter only needs to know roughly which tokens the target's filters will drop, since its logits are not the target's.  So
the logits of a row are counted in bins below the largest one, and the floor is the edge of a bin: it may lie up to a bin's
width too low.

Shapes: R rows, W a run of the vocabulary, B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels

# Bins of 1/16 after temperature.  What lies 16 or more below the largest logit shares the last bin, which is never cut off.
BINS, PER_UNIT = 256, 16


class Filters(NamedTuple):
    """The filters of B sequences.  temperature_B, top_p_B, min_p_B: float32.  top_k_B: int64, 0 keeps all tokens."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor

    def expand_rows(self, rows: int) -> Filters:
        """A row for each of `rows` rows of logits; a sequence's rows are adjacent."""
        each = rows // self.top_k_B.shape[0]
        return Filters(*(column.repeat_interleave(each) for column in self))

    @property
    def heat_B(self) -> Tensor:
        """What logits are divided by; 1 in greedy rows, where no filter means anything."""
        return torch.where(self.temperature_B > 0, self.temperature_B, 1.0)


def least_logits(logits_RW: Tensor, filters: Filters) -> Tensor:
    """[R] float32: the least logit of each row that the filters keep, -inf where they keep all; on a GPU one kernel launch."""
    if use_kernels(logits_RW):
        from specdec.ops.noise.floor_triton import launch_least_logits

        return launch_least_logits(logits_RW, filters)
    largest_R = logits_RW.float().amax(-1)
    return floor_of(bin_counts(logits_RW, largest_R, filters), largest_R, filters)


def bin_counts(logits_RW: Tensor, largest_R: Tensor, filters: Filters) -> Tensor:
    """[R, BINS] float32: how many logits lie in each bin below the row's largest one.  -inf and NaN count in the last bin."""
    scale_R = PER_UNIT / filters.expand_rows(len(logits_RW)).heat_B
    depth_RW = (largest_R[:, None] - logits_RW.float()) * scale_R[:, None]
    bin_RW = torch.where(depth_RW < BINS - 1, depth_RW, BINS - 1).long()
    counts_RN = torch.zeros(len(logits_RW), BINS, device=logits_RW.device)
    return counts_RN.scatter_add_(1, bin_RW, torch.ones_like(depth_RW))


def floor_of(counts_RN: Tensor, largest_R: Tensor, filters: Filters) -> Tensor:
    """[R] float32: `least_logits` of rows with these counts of their logits."""
    rows = filters.expand_rows(len(counts_RN))
    bins_N = torch.arange(BINS, device=counts_RN.device)
    enough_RN = (counts_RN.cumsum(-1) >= rows.top_k_B[:, None]) & (rows.top_k_B > 0)[:, None]
    last_R = torch.where(enough_RN, bins_N, BINS - 1).amin(-1)
    mass_RN = counts_RN * torch.exp((bins_N + 0.5) / -PER_UNIT) * (bins_N <= last_R[:, None])
    before_RN = mass_RN.cumsum(-1)
    wanted_R = rows.top_p_B * mass_RN.sum(-1)
    enough_RN = (before_RN >= wanted_R[:, None]) & (rows.top_p_B < 1)[:, None]
    last_R = torch.minimum(last_R, torch.where(enough_RN, bins_N, BINS - 1).amin(-1))
    edge_R = largest_R - rows.heat_B * (last_R + 1) / PER_UNIT
    floor_R = torch.where(last_R < BINS - 1, edge_R, -torch.inf)
    floor_R = torch.maximum(floor_R, largest_R + rows.heat_B * rows.min_p_B.log())
    return torch.where(rows.temperature_B > 0, floor_R, -torch.inf)
