"""The approximate cutoff: about the smallest logit that top-k, top-p and min-p keep, found without sorting.

A drafter only needs to know roughly which tokens the target's filters will drop, since its logits are not the target's.  So the
cutoff is one of 255 edges below the row's largest logit: it may lie up to the distance of two edges below the exact one
(cutoff.py).

Shapes: R rows, W a run of the vocabulary, B sequences, N bins between the edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.noise.filters import Filters

# Edges are 1/16 apart after temperature.  They are shifted a little, because 16-bit logits often lie at multiples of 1/16.
# What lies below the last edge is never cut off.
BINS, PER_UNIT, SHIFT = 256, 16, 0.7


def approximate_cutoffs(logits_RW: Tensor, filters: Filters) -> Tensor:
    """[R] float32: the smallest logit that the filters keep of each row, -inf where they keep all; on a GPU one launch."""
    if use_kernels(logits_RW):
        from specdec.ops.noise.approximate_cutoff_triton import launch_approximate_cutoffs

        return launch_approximate_cutoffs(logits_RW, filters)
    largest_R = logits_RW.float().amax(-1)
    return cutoffs_of_bins(bins_of(logits_RW, largest_R, filters), largest_R, filters)


def bins_of(logits_RW: Tensor, largest_R: Tensor, filters: Filters) -> Tensor:
    """[R, 2, N] float32: how many logits lie in each bin below the row's largest, and the sum of their exponentials.

    -inf and NaN count in the last bin.
    """
    safe_temperature_R1 = filters.expand_rows(len(logits_RW)).safe_temperature_B[:, None]
    depth_RW = (largest_R[:, None] - logits_RW.float()) / safe_temperature_R1
    bin_RW = (depth_RW * PER_UNIT - SHIFT).floor() + 1
    bin_RW = torch.where(bin_RW < BINS - 1, bin_RW.clamp(min=0), BINS - 1).long()
    bins_R2N = torch.zeros(len(logits_RW), 2, BINS, dtype=torch.float32, device=logits_RW.device)
    bins_R2N[:, 0].scatter_add_(1, bin_RW, torch.ones_like(depth_RW))
    bins_R2N[:, 1].scatter_add_(1, bin_RW, torch.exp(-depth_RW))
    return bins_R2N


def cutoffs_of_bins(bins_R2N: Tensor, largest_R: Tensor, filters: Filters) -> Tensor:
    """[R] float32: `approximate_cutoffs` of rows with these bins."""
    rows = filters.expand_rows(len(bins_R2N))
    bins_N = torch.arange(BINS, dtype=torch.int64, device=bins_R2N.device)
    count_RN, mass_RN = bins_R2N.cumsum(-1).unbind(1)
    enough_RN = (count_RN >= rows.top_k_B[:, None]) & (rows.top_k_B > 0)[:, None]
    last_R = torch.where(enough_RN, bins_N, BINS - 1).amin(-1)
    wanted_R = rows.top_p_B * mass_RN.gather(1, last_R[:, None])[:, 0]
    enough_RN = (mass_RN >= wanted_R[:, None]) & (rows.top_p_B < 1)[:, None]
    last_R = torch.minimum(last_R, torch.where(enough_RN, bins_N, BINS - 1).amin(-1))
    edge_R = largest_R - rows.safe_temperature_B * (last_R.float() + SHIFT) / PER_UNIT
    cutoff_R = torch.where(last_R < BINS - 1, edge_R, -torch.inf)
    cutoff_R = torch.maximum(cutoff_R, largest_R + rows.safe_temperature_B * rows.min_p_B.log())
    return torch.where(rows.temperature_B > 0, cutoff_R, -torch.inf)
