"""The lightning indexer of sparse latent attention (DeepSeek V3.2), by its definition: scores, the best keys, their slots.

These functions are pure tensor code; the kernels in scores_triton.py and select_triton.py compute the same.  A query's
candidates are numbered by position: its sequence's cached keys in order, and after them, in a draft tree, the nodes of its own
path.  This module knows no plan and no model.

Shapes: T queries, H indexer heads, D indexer dim, N candidates, I selected keys, R rows of a page table, W pages of a row, P
nodes of a path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.ops.topk import stable_topk

NOTHING = -1  # in rows of positions: no key


def indexer_scores(q_THD: Tensor, w_TH: Tensor, k_ND: Tensor) -> Tensor:
    """[T, N] float32: the sum over heads of w * relu(q . k * D ** -0.5).  The caller has scaled the weights w by H ** -0.5."""
    products_THN = torch.einsum("thd,nd->thn", q_THD.float(), k_ND.float()) * q_THD.shape[2] ** -0.5
    return torch.einsum("th,thn->tn", w_TH.float(), products_THN.relu())


def select_rows(scores_TN: Tensor, visible_T: Tensor, topk: int) -> Tensor:
    """[T, min(topk, N)] int32: the positions of each query's topk best keys among its first visible_T candidates, ascending.

    Ties go to the lower position.  A query that sees at most topk keys selects all of them.  NOTHING fills the places after
    the selected positions.
    """
    N = scores_TN.shape[1]
    place_N = torch.arange(N, dtype=torch.int32, device=scores_TN.device)
    visible_TN = place_N < visible_T[:, None]
    best_TI = stable_topk(torch.where(visible_TN & ~scores_TN.isnan(), scores_TN.float(), -torch.inf), min(topk, N))[1]
    counts_T = visible_T.clamp(max=min(topk, N)).int()
    # Of keys that all score -inf some may be invisible: counting from the best, only the first counts_T places are selected.
    selected_TI = place_N[: best_TI.shape[1]] < counts_T[:, None]
    positions_TI = torch.where(selected_TI, best_TI, N).sort(dim=1).values
    return torch.where(selected_TI, positions_TI, NOTHING).int()


def to_slots(
    positions_TI: Tensor, pages: PageTable, rows_T: Tensor, paged_T: Tensor, path_TP: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(slots [T, I] int32, counts [T] int32): the cache slots of selected positions, in the same order and without gaps.

    positions_TI: int32 positions within each query's sequence.  NOTHING marks an empty place, which may be anywhere.
    rows_T: the row of the page table that each query reads.
    paged_T: how many keys each query reads through the page table.  A position below that is found in the table; a position
        at or above it is a node of the query's path.
    path_TP: int32 slots of each query's own path, in the order of positions.
    Positions that are NOTHING, and positions beyond the table or the path, are dropped.  The places after the slots hold 0.
    """
    at_TI, P = positions_TI.long(), pages.page_size
    paged_TI = (at_TI >= 0) & (at_TI < paged_T[:, None]) & (at_TI < pages.capacity)
    page_TI = pages.table[rows_T.long()[:, None], torch.where(paged_TI, at_TI // P, 0)]
    slots_TI = torch.where(paged_TI, page_TI.long() * P + at_TI % P, 0)
    ok_TI = paged_TI
    if path_TP is not None:
        step_TI = at_TI - paged_T[:, None]
        on_path_TI = (at_TI >= 0) & (step_TI >= 0) & (step_TI < path_TP.shape[1])
        slots_TI = torch.where(on_path_TI, path_TP.long().gather(1, step_TI.clamp(0, path_TP.shape[1] - 1)), slots_TI)
        ok_TI = paged_TI | on_path_TI
    order_TI = torch.argsort(ok_TI.logical_not().int(), dim=1, stable=True)
    return torch.where(ok_TI, slots_TI, 0).gather(1, order_TI).int(), ok_TI.sum(1).int()
