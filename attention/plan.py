"""Builders of segments: they turn page tables and lengths into descriptions of which query reads which keys.

Builders are pure tensor code without host reads, so they run inside CUDA graphs.  A builder that fills a table writes into its
argument `out`, which is fresh memory or a view of a static buffer; the builder can't tell which.  On a GPU, kernels fill a
round's tables (`next_tokens` here; a tree's tables in draft/ and verify/); these builders are the kernels' definition.

Shapes: B sequences, K topk, N tree nodes, S draft steps, W table width, P queries per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.segment import Segment, uniform_cu_seqlens
from specdec.ops.index import use_index_kernels


def slots_at(page_table_BW: Tensor, positions_BP: Tensor, page_size: int) -> Tensor:
    """[B, P] int64: the cache slots of the given positions of each sequence."""
    pages_BP = page_table_BW.gather(1, positions_BP // page_size)
    return pages_BP.long() * page_size + positions_BP % page_size


class NextTokens(NamedTuple):
    """The next P tokens of each sequence: positions and slots, int64, [B, P], or [P, B] if `by_step`.

    ends_PB: int32, how many keys each token may read: all keys before the token, and its own.
    """

    positions: Tensor
    slots: Tensor
    ends_PB: Tensor


def next_tokens(page_table_BW: Tensor, lens_B: Tensor, count: int, page_size: int, by_step: bool = False) -> NextTokens:
    """The next `count` tokens after the first lens_B (int32) of each sequence.

    by_step: the tokens are processed in `count` steps, one token of each sequence a step; the result is [P, B], so that each
        step's tokens are contiguous.
    """
    if use_index_kernels(lens_B):
        from specdec.attention.kernels.tables_triton import launch_next_tokens

        return NextTokens(*launch_next_tokens(page_table_BW, lens_B, count, page_size, by_step))
    positions_PB = lens_B.long() + torch.arange(count, device=lens_B.device)[:, None]
    positions_BP = positions_PB.t().contiguous()
    slots_BP = slots_at(page_table_BW, positions_BP, page_size)
    ends_PB = (positions_PB + 1).int()
    if by_step:
        return NextTokens(positions_PB, slots_BP.t().contiguous(), ends_PB)
    return NextTokens(positions_BP, slots_BP, ends_PB)


def prefix_segment(page_table_BW: Tensor, lens_B: Tensor, queries_per_row: int, page_size: int) -> Segment:
    """Every query of a sequence reads the whole committed prefix.  Nothing is copied: the segment is a view of its inputs."""
    cu_seqlens_q = uniform_cu_seqlens(lens_B.shape[0], queries_per_row, lens_B.device)
    return Segment(page_table_BW, lens_B, cu_seqlens_q, queries_per_row, False, page_size)


def causal_segment(page_table_BW: Tensor, lens_B: Tensor, queries_per_row: int, page_size: int) -> Segment:
    """The last `queries_per_row` tokens of each sequence read everything up to themselves (chain, extend, decode).

    lens_B includes the queries' own tokens, whose keys have been stored before.
    """
    cu_seqlens_q = uniform_cu_seqlens(lens_B.shape[0], queries_per_row, lens_B.device)
    return Segment(page_table_BW, lens_B, cu_seqlens_q, queries_per_row, queries_per_row > 1, page_size)


def fill_draft_suffix(out: Segment, ancestor_slots_BKS: Tensor, step: int) -> None:
    """Topk-expanded draft suffix: the branch in row b * K + k reads the step + 1 slots of its own path, its own slot last."""
    out.page_table.copy_(ancestor_slots_BKS[..., : step + 1].flatten(0, 1))
    out.cache_seqlens.fill_(step + 1)


def fill_tree_suffix(out: Segment, tree_slots_BN: Tensor, mask_BNN: Tensor) -> None:
    """Mask-sorted tree suffix: node n reads its ancestors and itself, whose slots are packed to the left of its row.

    Example: slots 8 9 10 under the mask row 1 0 1 become 8 10; slot 9 lands past the row's length and is not read.
    The table may be as narrow as the longest path: the most ancestors of any node, plus the node itself.
    """
    B, N = tree_slots_BN.shape
    W = out.page_table.shape[1]
    order_BNW = torch.argsort(mask_BNN.logical_not(), dim=-1, stable=True)[..., :W]
    slots_BNW = tree_slots_BN[:, None].expand(B, N, N).gather(-1, order_BNW)
    out.page_table.copy_(slots_BNW.flatten(0, 1))
    out.cache_seqlens.copy_(mask_BNN.sum(-1).flatten())
