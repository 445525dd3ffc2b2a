"""Builders: who reads which keys, written as segments.  Pure tensor code, free of host reads, so it runs inside CUDA graphs.

A builder that fills a table writes into `out`, which is fresh or a view of a static buffer; it can't tell.  On a GPU a round
fills its tables by kernels (`next_tokens` here; a tree's in its own rooms), for which these builders are the definition.

Shapes: B sequences, K topk, N tree nodes, S draft steps, W table width, P queries per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.segment import Segment, uniform_cu_seqlens
from specdec.ops.index import use_index_kernels


def slots_at(page_table_BW: Tensor, positions_BP: Tensor, page_size: int) -> Tensor:
    """[B, P] int64 slots of the given positions of each sequence."""
    pages_BP = page_table_BW.gather(1, positions_BP // page_size)
    return pages_BP.long() * page_size + positions_BP % page_size


class NextTokens(NamedTuple):
    """Where the next P tokens of each sequence stand, [B, P], or [P, B] by step; int64.

    ends_PB: int32, the keys that each of them may read: all before it, and its own.
    """

    positions: Tensor
    slots: Tensor
    ends_PB: Tensor


def next_tokens(page_table_BW: Tensor, lens_B: Tensor, count: int, page_size: int, by_step: bool = False) -> NextTokens:
    """The next `count` tokens behind lens_B.  by_step: they are run one after the other, so each step's rows lie together."""
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
    """Every query of a sequence reads the whole committed prefix.  Copies nothing: the segment is a view of its inputs."""
    cu_seqlens_q = uniform_cu_seqlens(lens_B.shape[0], queries_per_row, lens_B.device)
    return Segment(page_table_BW, lens_B, cu_seqlens_q, queries_per_row, False, page_size)


def causal_segment(page_table_BW: Tensor, lens_B: Tensor, queries_per_row: int, page_size: int) -> Segment:
    """The last `queries_per_row` tokens of each sequence read everything up to themselves (chain, extend, decode).

    lens_B counts the queries' own tokens too, whose keys are already stored.
    """
    cu_seqlens_q = uniform_cu_seqlens(lens_B.shape[0], queries_per_row, lens_B.device)
    return Segment(page_table_BW, lens_B, cu_seqlens_q, queries_per_row, queries_per_row > 1, page_size)


def ragged_causal_segment(page_table_BW: Tensor, query_lens: list[int], lens: list[int], page_size: int) -> Segment:
    """Prompts of different lengths, packed one behind the other (prefill); each brings the last of its `lens` tokens."""
    cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    lens_B = torch.tensor(lens, dtype=torch.int32)
    device, ragged = page_table_BW.device, min(query_lens) < max(query_lens)
    cached = max(length - count for length, count in zip(lens, query_lens, strict=True))
    row = (page_table_BW, lens_B.to(device), cu_seqlens_q.to(device), max(query_lens))
    return Segment(*row, True, page_size, ragged, max_cached=cached)


def fill_draft_suffix(out: Segment, ancestor_slots_BKS: Tensor, step: int) -> None:
    """Topk-expanded draft suffix: the branch in row b * K + k reads the step + 1 slots of its own path, itself last."""
    out.page_table.copy_(ancestor_slots_BKS[..., : step + 1].flatten(0, 1))
    out.cache_seqlens.fill_(step + 1)


def fill_tree_suffix(out: Segment, tree_slots_BN: Tensor, mask_BNN: Tensor) -> None:
    """Mask-sorted tree suffix: node n reads its ancestors and itself, packed to the left.

    Slots 8 9 10 under the mask row 1 0 1 become 8 10 (9 falls behind the row's length).  The table may be as narrow as
    the deepest node's count of ancestors, itself included.
    """
    B, N = tree_slots_BN.shape
    W = out.page_table.shape[1]
    order_BNW = torch.argsort(mask_BNN.logical_not(), dim=-1, stable=True)[..., :W]
    slots_BNW = tree_slots_BN[:, None].expand(B, N, N).gather(-1, order_BNW)
    out.page_table.copy_(slots_BNW.flatten(0, 1))
    out.cache_seqlens.copy_(mask_BNN.sum(-1).flatten())
