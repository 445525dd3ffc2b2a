"""From an indexer's queries and cached keys to the segment that latent attention then reads: one row of slots for each query.

Shapes: T queries, H indexer heads, D indexer dim, X slots, N candidates, I selected keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.indexer import NOTHING, indexer_scores, select_rows, to_slots
from specdec.ops.launch import use_kernels
from specdec.ops.operator import use_operator

GATHERED = 1 << 24  # elements of keys that the pure version gathers at once


def sparse_segment(q_THD: Tensor, w_TH: Tensor, keys_XD: Tensor, candidates: CandidateKeys, topk: int) -> Segment:
    """The keys that each query selects, as one row of slots a query.

    q_THD, w_TH: the indexer's queries and head weights; the caller has scaled the weights by H ** -0.5.
    keys_XD: the layer's buffer of indexer keys, one key a slot.  The fresh tokens' keys have been stored.
    candidates: of the pass's plan, which all its layers share.
    """
    assert topk > 0 and candidates.paged_T.shape[0] == q_THD.shape[0] == w_TH.shape[0]
    assert q_THD.shape[2] == keys_XD.shape[1]
    if use_operator(q_THD):
        from specdec.attention.operators.sparse import SELECT_KEYS

        assert candidates.copy is None, "a traced pass converts no latents"
        pages, rows, suffix = candidates.segment.pages, candidates.segment, candidates.suffix
        slots_TI = SELECT_KEYS(
            q_THD, w_TH, keys_XD, topk, pages.table, rows.cache_seqlens, rows.cu_seqlens_q, rows.max_seqlen_q, pages.page_size,
            rows.causal, candidates.rows_T, candidates.paged_T, candidates.path_T,
            None if suffix is None else suffix.pages.table, rows.ragged,
        )  # fmt: skip
        return Segment.of_slots(slots_TI, candidates.counts_T(topk))
    if use_kernels(q_THD):
        from specdec.attention.sparse.launch import launch_sparse_segment

        return launch_sparse_segment(q_THD, w_TH, keys_XD, candidates, topk)
    return pure_segment(q_THD, w_TH, keys_XD, candidates, topk)


def pure_segment(q_THD: Tensor, w_TH: Tensor, keys_XD: Tensor, candidates: CandidateKeys, topk: int) -> Segment:
    """`sparse_segment` by its definition, a few queries at a time.  The kernels compute the same."""
    T = q_THD.shape[0]
    slots_TI = torch.zeros(T, min(topk, candidates.width), dtype=torch.int32, device=q_THD.device)
    counts_T = torch.zeros(T, dtype=torch.int32, device=q_THD.device)
    for part, scores_tN in _scored(q_THD, w_TH, keys_XD, candidates):
        selected = select_rows(scores_tN, candidates.visible_T[part], topk)
        slots_TI[part], counts_T[part] = _slots(selected, candidates, candidates.pages, part)
    return Segment.of_slots(slots_TI, counts_T)


def best_keys(q_THD: Tensor, w_TH: Tensor, keys_XD: Tensor, candidates: CandidateKeys, topk: int) -> tuple[Tensor, Tensor]:
    """(scores [T, I] float32, positions [T, I] int32) of the keys that each query selects, ascending by position.

    The arguments: of `sparse_segment`.  NOTHING fills the places after the selected positions, with any score but NaN.
    """
    if use_kernels(q_THD):
        from specdec.attention.sparse.launch import launch_best_keys

        return launch_best_keys(q_THD, w_TH, keys_XD, candidates, topk)
    return pure_best_keys(q_THD, w_TH, keys_XD, candidates, topk)


def pure_best_keys(q_THD: Tensor, w_TH: Tensor, keys_XD: Tensor, candidates: CandidateKeys, topk: int) -> tuple[Tensor, Tensor]:
    """`best_keys` by its definition."""
    T, I = q_THD.shape[0], min(topk, candidates.width)
    found_TI = torch.zeros(T, I, dtype=torch.float32, device=q_THD.device)
    positions_TI = torch.full((T, I), NOTHING, dtype=torch.int32, device=q_THD.device)
    for part, scores_tN in _scored(q_THD, w_TH, keys_XD, candidates):
        positions_TI[part] = select_rows(scores_tN, candidates.visible_T[part], topk)
        compared_tN = torch.where(scores_tN.isnan(), -torch.inf, scores_tN)
        found_TI[part] = compared_tN.gather(1, positions_TI[part].clamp(min=0).long())
    return found_TI, positions_TI


def _scored(q_THD: Tensor, w_TH: Tensor, keys_XD: Tensor, candidates: CandidateKeys) -> Iterator[tuple[slice, Tensor]]:
    """For each few queries: (which, their scores [t, N] of all candidates)."""
    T, step = q_THD.shape[0], max(1, GATHERED // max(1, candidates.width * keys_XD.shape[1]))
    for t in range(0, T, step):
        part = slice(t, min(t + step, T))
        every = _every_candidate(candidates, part)
        slots_tN = _slots(every, candidates, candidates.segment.pages, part)[0].long()
        queries = zip(q_THD[part], w_TH[part], slots_tN, strict=True)
        yield part, torch.stack([indexer_scores(q[None], w[None], keys_XD[slots_N])[0] for q, w, slots_N in queries])


def _every_candidate(candidates: CandidateKeys, part: slice) -> Tensor:
    """[t, N] int32: all candidates of some queries, by position."""
    visible_t = candidates.visible_T[part]
    place_N = torch.arange(candidates.width, dtype=torch.int32, device=visible_t.device)
    return torch.where(place_N < visible_t[:, None], place_N, NOTHING)


def _slots(positions_tI: Tensor, candidates: CandidateKeys, pages: PageTable, part: slice) -> tuple[Tensor, Tensor]:
    path_tP = None if candidates.suffix is None else candidates.suffix.pages.table[part]
    return to_slots(positions_tI, pages, candidates.rows_T[part], candidates.paged_T[part], path_tP)
