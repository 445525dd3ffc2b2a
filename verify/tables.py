"""The tables of one target pass over trees: the nodes' positions and slots, and which keys each node reads.

In a sequence of L committed tokens, node n is stored at slot number L + n and has rotary position L + its depth.

Shapes: B sequences, N nodes, T = B * N.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.shared import split_shared
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.ops.index import use_index_kernels


class TreeTables(NamedTuple):
    """positions_T: int64.  slots_BN: int64.  plan: the attention plan of the target's pass."""

    positions_T: Tensor
    slots_BN: Tensor
    plan: AttentionPlan


def tree_tables(state: BatchState, tree: DraftTree) -> TreeTables:
    """The tables of a pass over these trees.

    The plan of a chain is one causal segment; that of a tree is the prefix, and a suffix that holds each node's own path.  If
    rows share pages, these become one more segment in front.
    """
    N, pages = tree.num_nodes, state.pages
    cross = state.sources and state.sources.read_by(N)
    if tree.is_chain:
        rows = pages.next_tokens(state.lens_B, N)
        segment = causal_segment(pages, rows.ends_PB[-1], N)
        positions_T = rows.positions.flatten()
        plan = AttentionPlan(split_shared(segment, state.shared), positions_T, cross=cross)
        return TreeTables(positions_T, rows.slots, plan)
    positions_T, slots_BN, suffix = path_tables(pages, state.lens_B, tree)
    prefix = prefix_segment(pages, state.lens_B, N)
    plan = AttentionPlan(split_shared(prefix, state.shared), positions_T, suffix, cross)
    return TreeTables(positions_T, slots_BN, plan)


def path_tables(pages: PageTable, lens_B: Tensor, tree: DraftTree) -> tuple[Tensor, Tensor, Segment]:
    """(positions [T] int64, slots [B, N] int64, the suffix: one row for each node, its path from the root to itself)."""
    B, N = tree.tokens_BN.shape
    width = min(N, tree.max_depth + 1)
    if use_index_kernels(lens_B):
        from specdec.verify.tables_triton import launch_path_tables

        return launch_path_tables(pages, lens_B, tree.parents_BN, width)
    nodes_N, mask_BNN = torch.arange(N, device=lens_B.device), tree.mask_BNN
    slots_BN = pages.slots_at(lens_B[:, None] + nodes_N)
    suffix = replace(Segment.empty(B * N, width, 1, device=lens_B.device), base_B=lens_B)
    fill_tree_suffix(suffix, slots_BN, mask_BNN)
    positions_BN = lens_B[:, None] + mask_BNN.sum(-1) - 1
    return positions_BN.flatten(), slots_BN, suffix
