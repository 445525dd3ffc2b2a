"""The operators of sparse latent attention's indexer: store its keys, and select the keys that each query reads.

Scores and selection are one operator: scores of all queries and keys would take more memory than either leaves behind, so they
are computed and used up for a part of the queries at a time.  The attention over the selected keys is `latent_attention`.

Shapes: T tokens or queries, J heads of the indexer, I dims of its heads, N slots, P positions, R rows, W table width, S nodes
of a path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.index_store import IndexPrep, store_index
from specdec.attention.sparse.segment import sparse_segment
from specdec.ops.operator import define
from specdec.ops.rope import Rotation


def index_store(
    q_TJI: Tensor,
    key_TI: Tensor,
    weights_TJ: Tensor,
    index_keys_NI: Tensor,
    slots_T: Tensor,
    positions_T: Tensor,
    table_P2R: Tensor,
    norm_I: Tensor,
    bias_I: Tensor,
    eps: float,
    scale: float,
) -> Tensor:
    """Norms and rotates an indexer's keys into their slots (int64), rotates its queries in place, and returns the weights of
    its heads, scaled: [T, J], float32 or wider.
    """
    prep = IndexPrep(Rotation(table_P2R, positions_T), norm_I, bias_I, eps, scale)
    return store_index(index_keys_NI, q_TJI, key_TI, weights_TJ, slots_T, prep)


def index_store_fake(q_TJI: Tensor, key_TI: Tensor, weights_TJ: Tensor, *_: object) -> Tensor:
    """Empty weights."""
    dtype = torch.promote_types(weights_TJ.dtype, torch.float32)
    return weights_TJ.new_empty(weights_TJ.shape, dtype=dtype)


def select_keys(
    q_TJI: Tensor,
    weights_TJ: Tensor,
    index_keys_NI: Tensor,
    topk: int,
    table_RW: Tensor,
    lens_R: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    page_size: int,
    causal: bool,
    rows_T: Tensor,
    paged_T: Tensor,
    path_T: Tensor,
    paths_TS: Tensor | None = None,
    ragged: bool = False,
) -> Tensor:
    """[T, min(topk, candidates)] int32: the slots of each query's best keys, in the order of positions.

    A query selects as many as it has candidates, at most topk; the places after them are arbitrary.
    table_RW to causal, and ragged: the fields of the paged Segment.  rows_T, paged_T, path_T: those of CandidateKeys.
    paths_TS: int32, the slots of each query's own path in a draft tree; None: there is no tree.
    """
    pages = Segment(PageTable(table_RW, page_size), lens_R, cu_seqlens_q, max_seqlen_q, causal, ragged)
    suffix = None if paths_TS is None else Segment.of_slots(paths_TS, path_T)
    candidates = CandidateKeys(pages, suffix, rows_T, paged_T, path_T)
    return sparse_segment(q_TJI, weights_TJ, index_keys_NI, candidates, topk).pages.table


def select_keys_fake(
    q_TJI: Tensor,
    weights_TJ: Tensor,
    index_keys_NI: Tensor,
    topk: int,
    table_RW: Tensor,
    lens_R: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    page_size: int,
    causal: bool,
    rows_T: Tensor,
    paged_T: Tensor,
    path_T: Tensor,
    paths_TS: Tensor | None = None,
    ragged: bool = False,
) -> Tensor:
    """Empty rows of slots."""
    width = table_RW.shape[1] * page_size + (0 if paths_TS is None else paths_TS.shape[1])
    return table_RW.new_empty(q_TJI.shape[0], torch.sym_min(topk, width))


INDEX_STORE = define(
    "index_store(Tensor(a!) q, Tensor key, Tensor weights, Tensor(b!) index_keys, Tensor slots, Tensor positions, "
    "Tensor table, Tensor norm, Tensor bias, float eps, float scale) -> Tensor",
    index_store,
    index_store_fake,
)
SELECT_KEYS = define(
    "select_keys(Tensor q, Tensor weights, Tensor index_keys, SymInt topk, Tensor table, Tensor lens, Tensor cu_seqlens_q, "
    "SymInt max_seqlen_q, SymInt page_size, bool causal, Tensor rows, Tensor paged, Tensor path, Tensor? paths=None, "
    "bool ragged=False) -> Tensor",
    select_keys,
    select_keys_fake,
)
