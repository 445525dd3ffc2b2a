"""Builders of segments: they turn page tables and lengths into descriptions of which query reads which keys.

Builders are pure tensor code without host reads, so they run inside CUDA graphs.  A builder that fills a table writes into its
argument `out`, which is fresh memory or a view of a static buffer; the builder can't tell which.  On a GPU, kernels fill a
tree's tables (in draft/ and verify/); these builders are the kernels' definition.

Shapes: B sequences, K topk, N tree nodes, S draft steps, W table width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.segment import Fresh, Segment, uniform_cu_seqlens


def prefix_segment(pages: PageTable, lens_B: Tensor, queries_per_row: int, fresh: Fresh = "all") -> Segment:
    """Every query of a sequence reads the whole committed prefix.  Nothing is copied: the segment is a view of its inputs."""
    cu_seqlens_q = uniform_cu_seqlens(lens_B.shape[0], queries_per_row, lens_B.device)
    return Segment(pages, lens_B, cu_seqlens_q, queries_per_row, fresh=fresh)


def causal_segment(pages: PageTable, lens_B: Tensor, queries_per_row: int, fresh: Fresh = "all") -> Segment:
    """The last `queries_per_row` tokens of each sequence read everything up to themselves (chain, extend, decode).

    lens_B includes the queries' own tokens, whose keys have been stored before.
    """
    return replace(prefix_segment(pages, lens_B, queries_per_row, fresh), causal=queries_per_row > 1)


def fill_draft_suffix(out: Segment, ancestor_slots_BKS: Tensor, step: int) -> None:
    """Topk-expanded draft suffix: the branch in row b * K + k reads the step + 1 slots of its own path, its own slot last."""
    out.pages.table.copy_(ancestor_slots_BKS[..., : step + 1].flatten(0, 1))
    out.cache_seqlens.fill_(step + 1)


def fill_tree_suffix(out: Segment, tree_slots_BN: Tensor, mask_BNN: Tensor) -> None:
    """Mask-sorted tree suffix: node n reads its ancestors and itself, whose slots stand at the left of its row, without gaps.

    Example: slots 8 9 10 under the mask row 1 0 1 become 8 10; slot 9 lands past the row's length and is not read.
    The table may be as narrow as the longest path: the most ancestors of any node, plus the node itself.
    """
    B, N = tree_slots_BN.shape
    W = out.pages.table.shape[1]
    order_BNW = torch.argsort(mask_BNN.logical_not(), dim=-1, stable=True)[..., :W]
    slots_BNW = tree_slots_BN[:, None].expand(B, N, N).gather(-1, order_BNW)
    out.pages.table.copy_(slots_BNW.flatten(0, 1))
    out.cache_seqlens.copy_(mask_BNN.sum(-1).flatten())
