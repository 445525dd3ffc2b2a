"""The tables of one target pass over trees: the nodes' positions and slots, and which keys each node reads.

In a sequence of L committed tokens, node n is stored at slot number L + n and has rotary position L + its depth.

Shapes: B sequences, N nodes, T = B * N.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.attend import PassTables
from specdec.attention.context_parallel.tables import ContextParallel
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, LaterQueries, Segment
from specdec.attention.shared import split_shared
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.ops.index import kept, use_index_kernels


class TreeTables(NamedTuple):
    """positions_T: int64.  slots_BN: int64.  plan: the attention plan of the target's pass.

    targets_BN: int64, where this rank keeps the first N tokens after those that are committed, in context
        parallelism.  None: they lie where the nodes do.
    """

    positions_T: Tensor
    slots_BN: Tensor
    plan: AttentionPlan
    targets_BN: Tensor | None = None

    def before(self, prompts: PassTables) -> PassTables:
        """The tables of one pass over these nodes and then prompts.  Its rows_plan is of all nodes and the prompts' own."""
        assert prompts.rows_plan is not None
        nodes = self.slots_BN.numel()
        plan, rows_plan = (replace(self.plan, later=LaterQueries(nodes, each)) for each in (prompts.plan, prompts.rows_plan))
        return PassTables(plan, torch.cat((self.slots_BN.flatten(), prompts.slots_T)), rows_plan)


def tree_tables(state: BatchState, tree: DraftTree) -> TreeTables:
    """The tables of a pass over these trees.

    The plan of a chain is one causal segment; that of a tree is the prefix, and a suffix that holds each node's own path.  If
    rows share pages, these become one more segment in front.
    """
    N, pages = tree.num_nodes, state.pages
    cross = state.encoder_texts and state.encoder_texts.read_by(N)
    if tree.is_chain:
        rows = pages.next_tokens(state.lens_B, N)
        segment = causal_segment(pages, rows.ends_PB[-1], N, "queries")
        positions_T = rows.positions.flatten()
        plan = AttentionPlan(split_shared(segment, state.shared), positions_T, cross=cross)
        return TreeTables(positions_T, rows.slots, plan)
    positions_T, slots_BN, suffix = path_tables(pages, state.lens_B, tree)
    prefix = prefix_segment(pages, state.lens_B, N, "none")
    plan = AttentionPlan(split_shared(prefix, state.shared), positions_T, suffix, cross)
    return TreeTables(positions_T, slots_BN, plan)


def context_parallel_tables(state: BatchState, tree: DraftTree, context: ContextParallel) -> TreeTables:
    """The tables of a pass over these trees in context parallelism: the nodes lie in the scratch of every rank."""
    N, pages, lens_B = tree.num_nodes, state.pages, state.lens_B
    rows = pages.next_tokens(lens_B, N)
    scratch, prefix = context.scratch_pages(state.rows, N, lens_B.device), context.prefix(pages, lens_B, N)
    targets_BN = context.sharding.local_slots(rows.slots)
    if tree.is_chain:
        positions_T, slots_BN = rows.positions.flatten(), scratch.table.long()
        ends_T = _ends(state.rows, N, lens_B.device)
        suffix = Segment.of_slots(scratch.table.repeat_interleave(N, 0), ends_T, lens_B)
    else:
        depths_T, slots_BN, suffix = path_tables(scratch, torch.zeros_like(lens_B), tree)
        suffix = replace(suffix, base_B=lens_B)
        positions_T = (depths_T.view(-1, N) + lens_B[:, None]).flatten()
    return TreeTables(positions_T, slots_BN, AttentionPlan((), positions_T, suffix, context_parallel=prefix), targets_BN)


@kept
def _ends(rows: int, count: int, device: torch.device) -> Tensor:
    """[rows * count] int32: 1 to `count`, for each row.  The tensor is cached: never write to it."""
    return torch.arange(1, count + 1, dtype=torch.int32, device=device).repeat(rows)


def path_tables(pages: PageTable, lens_B: Tensor, tree: DraftTree) -> tuple[Tensor, Tensor, Segment]:
    """(positions [T] int64, slots [B, N] int64, the suffix: one row for each node, its path from the root to itself)."""
    B, N = tree.tokens_BN.shape
    width = min(N, tree.max_depth + 1)
    if use_index_kernels(lens_B):
        from specdec.batch.trees.tables_triton import launch_path_tables

        return launch_path_tables(pages, lens_B, tree.parents_BN, width)
    nodes_N, mask_BNN = torch.arange(N, dtype=torch.int64, device=lens_B.device), tree.mask_BNN
    slots_BN = pages.slots_at(lens_B[:, None] + nodes_N)
    suffix = replace(Segment.empty(B * N, width, 1, device=lens_B.device), base_B=lens_B)
    fill_tree_suffix(suffix, slots_BN, mask_BNN)
    positions_BN = lens_B[:, None] + mask_BNN.sum(-1) - 1
    return positions_BN.flatten(), slots_BN, suffix
