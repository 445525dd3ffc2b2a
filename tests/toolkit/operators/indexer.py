"""The operators of sparse attention's indexer, and arguments for each."""

from collections.abc import Callable
from typing import Any

import torch

import specdec.attention.operators.sparse as sparse
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.ops.rope import rotary_table
from toolkit.operators.attention import SLOTS, P, ints, rand, table

J, I, R, TOPK = 16, 16, 8, 5


def index_store_args(device: str) -> tuple[Any, ...]:
    fresh = rand(device, 3, J, I), rand(device, 3, I), rand(device, 3, J)
    at = ints(device, 5, 17, 2, dtype=torch.int64), ints(device, 3, 9, 0, dtype=torch.int64)
    fixed = rotary_table(torch.rand(R // 2), 12).to(device), rand(device, I), rand(device, I), 1e-6, 0.25
    return *fresh, rand(device, SLOTS, I), *at, *fixed


def select_args(device: str, queries: int = 2, tree: bool = False, reads_all: bool = False) -> tuple[Any, ...]:
    """queries: of each of two rows.  reads_all: whether each query may read more keys than there are.

    Slots from 40 on hold NaN, and no query may read them.  Every place of the result is written, so that it can be compared.
    """
    T, keys = 2 * queries, rand(device, SLOTS, I)
    keys[40:] = torch.nan
    slots, lens = (ints(device, [3, 0, 5], [7, 9, 1]), (12, 12)) if reads_all else (table(device), (9, 6))
    rows = (ints(device, *lens), ints(device, *range(0, T + 1, queries)), queries)
    pages = Segment(PageTable(slots, P), *rows, causal=not tree and queries > 1)
    suffix = Segment.of_slots(ints(device, *[[38, 39, 63]] * T), ints(device, *[1, 2] * queries)) if tree else None
    found = CandidateKeys.of(AttentionPlan((pages,), suffix=suffix), T)
    own = (found.rows_T, found.paged_T, found.path_T, suffix.pages.table if suffix else None)
    return rand(device, T, J, I), rand(device, T, J), keys, 64 if reads_all else TOPK, slots, *rows, P, pages.causal, *own


CASES: dict[str, tuple[Any, Callable[[str], tuple[Any, ...]]]] = {
    "index store": (sparse.INDEX_STORE, index_store_args),
    "select decode": (sparse.SELECT_KEYS, lambda d: select_args(d, queries=1)),
    "select causal": (sparse.SELECT_KEYS, select_args),
    "select in a tree": (sparse.SELECT_KEYS, lambda d: select_args(d, tree=True)),
    "select all": (sparse.SELECT_KEYS, lambda d: select_args(d, queries=1, reads_all=True)),
}
