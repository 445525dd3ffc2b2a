"""Launches the kernels of sparse attention's indexer, a part of the queries at a time: scores, then the selection.

Nothing is read from the device: how many parts, programs and bytes there are follows from shapes and tables' widths; programs
beyond a row's true length end at once.

Shapes: T queries, H heads, D indexer dim, N candidates, S slices, I selected keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specdec.attention.kernels.tiles_triton import padded, programs_at_once
from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.indexer import NOTHING
from specdec.attention.sparse.scores_triton import multi_query_scores_kernel, single_query_scores_kernel
from specdec.attention.sparse.select_triton import filter_kernel, select_kernel
from specdec.ops.launch import chained

START = 4  # the time before a program of scores reads its first key, in blocks
LONG = 1 << 18  # threshold in candidates: with more, the selection's lists get twice the room
LONGEST = 1 << 30  # tokens: no sequence is as long
SCRATCH = 384 << 20  # bytes of scores and of lists that a part of the queries may take


class IndexerTiles(NamedTuple):
    """What one program works on.

    single_block, single_warps, single_stages: keys of a block, warps and stages of a program, in rows of one query.
    ctas_per_sm: programs of such rows that an SM is given.
    multi_block, multi_warps, multi_stages: the same in rows of several queries.
    multi_registers: of a thread; with these, two such programs fit an SM.
    max_queries: the most queries that such a program scores; min_queries: the fewest, if the row has them.
    select_block, select_warps: scores of a block of the selection, and warps of its programs.
    select_slices: programs of the selection that an SM is given.
    sampled: how many of a sample's scores are expected among the topk best.
    sample: the most scores of a sample.
    room: scores between the cutoffs for which a program of the selection has room: a lower bound, and a multiple of topk.
    """

    single_block: int = 128
    single_warps: int = 4
    single_stages: int = 3
    ctas_per_sm: int = 2
    multi_block: int = 256
    multi_warps: int = 8
    multi_stages: int = 2
    multi_registers: int = 128
    max_queries: int = 64
    min_queries: int = 4
    select_block: int = 2048
    select_warps: int = 8
    select_slices: int = 2
    sampled: int = 64
    sample: int = 8192
    room: tuple[int, int] = (1024, 2)


class Scratch(NamedTuple):
    """What the launches for a part of the queries hand on to each other."""

    scores: Tensor  # [queries, N] float32
    sample: Tensor  # [queries, M] float32: every `every`-th score
    listed: Tensor  # [queries, N] int32
    counts: Tensor  # [queries, S, 2] int32
    every: int


def launch_sparse_segment(
    q_THD: Tensor, w_TH: Tensor, keys_XD: Tensor, candidates: CandidateKeys, topk: int, sizes: IndexerTiles | None = None,
    programs: int | None = None, scratch_bytes: int = SCRATCH,
) -> Segment:  # fmt: skip
    """`segment.sparse_segment` by kernels.  programs: how many programs the GPU is taken to run at once."""
    (T, _, _), N, device = q_THD.shape, candidates.width, q_THD.device
    sizes, programs = _checked(q_THD, w_TH, keys_XD, candidates, sizes), programs or programs_at_once(device)
    slots_TI = torch.empty(T, min(topk, N), dtype=torch.int32, device=device)
    counts_T = candidates.counts_T(topk)
    part = max(1, min(T, scratch_bytes // (9 * max(1, N))))
    for first in range(0, T, part):
        queries = min(part, T - first)
        scratch = launch_scores(q_THD, w_TH, keys_XD, candidates, topk, first, queries, sizes, programs)
        launch_selection(candidates, topk, first, queries, scratch, slots_TI, sizes)
    return Segment.of_slots(slots_TI, counts_T)


def launch_best_keys(
    q_THD: Tensor, w_TH: Tensor, keys_XD: Tensor, candidates: CandidateKeys, topk: int, sizes: IndexerTiles | None = None,
    programs: int | None = None, scratch_bytes: int = SCRATCH,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`segment.best_keys` by kernels.  programs: how many programs the GPU is taken to run at once."""
    (T, _, _), N, device = q_THD.shape, candidates.width, q_THD.device
    sizes, programs = _checked(q_THD, w_TH, keys_XD, candidates, sizes), programs or programs_at_once(device)
    positions_TI = torch.empty(T, min(topk, N), dtype=torch.int32, device=device)
    found_TI = torch.empty(positions_TI.shape, dtype=torch.float32, device=device)
    assert candidates.suffix is None, "the candidates lie in one row each"
    # Of pages as long as any sequence, the first one's slots are positions.
    first_page = PageTable(torch.zeros(1, 1, dtype=torch.int32, device=device).expand(candidates.segment.rows, 1), LONGEST)
    part = max(1, min(T, scratch_bytes // (9 * max(1, N))))
    for first in range(0, T, part):
        queries = slice(first, min(first + part, T))
        scratch = launch_scores(
            q_THD, w_TH, keys_XD, candidates, topk, first, queries.stop - first, sizes, programs, scores_all=True
        )
        launch_selection(candidates, topk, first, queries.stop - first, scratch, positions_TI, sizes, first_page)
        torch.gather(scratch.scores, 1, positions_TI[queries].clamp(0, N - 1).long(), out=found_TI[queries])
    place_I = torch.arange(positions_TI.shape[1], dtype=torch.int32, device=device)
    is_selected_TI = place_I < candidates.counts_T(topk)[:, None]
    return torch.where(is_selected_TI, found_TI, 0.0), torch.where(is_selected_TI, positions_TI, NOTHING)


def _checked(
    q_THD: Tensor, w_TH: Tensor, keys_XD: Tensor, candidates: CandidateKeys, sizes: IndexerTiles | None
) -> IndexerTiles:
    """The sizes, or those for the queries' dtype, once the tensors were found to be such as the kernels read."""
    D = q_THD.shape[2]
    assert q_THD.dtype == keys_XD.dtype and keys_XD.shape[1] == D and w_TH.shape == q_THD.shape[:2]
    assert q_THD.stride()[1:] == (D, 1) and w_TH.stride(1) == keys_XD.stride(1) == 1
    assert candidates.segment.pages.table.stride(1) == candidates.pages.table.stride(1) == 1
    if sizes is not None:
        return sizes
    if q_THD.element_size() == 4:  # float32 uses no tensor cores, and twice the shared memory
        return IndexerTiles(single_block=32, multi_block=32, multi_warps=4, max_queries=8)
    return IndexerTiles()


def _scratch(queries: int, candidates: CandidateKeys, topk: int, sizes: IndexerTiles, programs: int) -> Scratch:
    N, device = candidates.width, candidates.paged_T.device
    slices = max(1, min(triton.cdiv(N, sizes.select_block), triton.cdiv(sizes.select_slices * programs, queries)))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(queries, *shape, dtype=dtype, device=device)

    every = sample_step(N, topk, sizes)
    scores, sample = (empty(width, dtype=torch.float32) for width in (N, triton.cdiv(N, every)))
    return Scratch(scores, sample, empty(N), empty(slices, 2), every)


@lru_cache
def score_splits(rows: int, blocks: int, at_once: int) -> int:
    """Into how many parts each row's keys are divided, by a simple model: a program takes the time of its blocks and of START
    more.

    rows: of one query.  blocks: of a row's keys, by the table's capacity.  at_once: programs that the GPU runs at once.
    """

    def time(splits: int) -> int:
        return -(-rows * splits // at_once) * (-(-blocks // splits) + START)

    return min(range(1, max(1, min(blocks, 4 * at_once // rows)) + 1), key=time)


def launch_scores(
    q_THD: Tensor, w_TH: Tensor, keys_XD: Tensor, candidates: CandidateKeys, topk: int, first: int, queries: int,
    sizes: IndexerTiles, programs: int, scores_all: bool = False,
) -> Scratch:  # fmt: skip
    """Scores a part of the queries.  scores_all: also those that see so few keys that they select all of them."""
    (_, H, D), device = q_THD.shape, q_THD.device
    segment, suffix = candidates.segment, candidates.suffix
    pages = segment.pages.table
    paths = pages if suffix is None else suffix.pages.table
    strides = (q_THD.stride(0), w_TH.stride(0), keys_XD.stride(0), pages.stride(0), paths.stride(0))
    scratch, skipped = _scratch(queries, candidates, topk, sizes, programs), 0 if scores_all else topk
    left, widths = (scratch.scores, scratch.sample), (scratch.scores.stride(0), scratch.sample.stride(0))
    shared = {
        "HEADS": H, "BLOCK_H": padded(H), "DIM": D, "BLOCK_D": padded(D), "PAGE_SIZE": segment.pages.page_size,
        "EVERY": scratch.every, "HAS_SUFFIX": suffix is not None, **chained(device),
    }  # fmt: skip
    paths_first = 0 if suffix is None else queries  # programs that score a query's path
    if segment.max_seqlen_q == 1:
        splits = score_splits(queries, triton.cdiv(segment.pages.capacity, sizes.single_block), sizes.ctas_per_sm * programs)
        single_query_scores_kernel[(paths_first + queries * splits,)](
            q_THD, w_TH, keys_XD, pages, paths, candidates.rows_T, candidates.paged_T, candidates.path_T,
            *left, D**-0.5, first, queries, splits, skipped, *strides, *widths,
            BLOCK_N=sizes.single_block, STAGES=sizes.single_stages, num_warps=sizes.single_warps,
            num_stages=sizes.single_stages, **shared,
        )  # fmt: skip
        return scratch
    most, blocks = min(segment.max_seqlen_q, queries), triton.cdiv(segment.pages.capacity, sizes.multi_block)
    # A program scores a block of keys for a group of queries, which is as large as still gives every SM several programs.
    wanted = max(min(most * segment.rows * blocks // (8 * programs), sizes.max_queries), sizes.min_queries)
    groups = triton.cdiv(most, wanted)
    group = triton.cdiv(most, groups)
    width = 0 if suffix is None else paths.shape[1]
    multi_query_scores_kernel[(paths_first + segment.rows * groups * blocks,)](
        q_THD, w_TH, keys_XD, pages, paths, segment.cu_seqlens_q, segment.cache_seqlens, candidates.paged_T,
        candidates.path_T, *left, D**-0.5, first, queries, groups, group, blocks, width, skipped, *strides, *widths,
        BLOCK_N=sizes.multi_block, CAUSAL=segment.causal, STAGES=sizes.multi_stages, num_warps=sizes.multi_warps,
        num_stages=sizes.multi_stages, maxnreg=sizes.multi_registers, **shared,
    )  # fmt: skip
    return scratch


def launch_selection(
    candidates: CandidateKeys, topk: int, first: int, queries: int, scratch: Scratch, slots_TI: Tensor, sizes: IndexerTiles,
    pages_read: PageTable | None = None,
) -> None:  # fmt: skip
    """Selects a part of the queries' best keys, into their rows of slots_TI.  pages_read: say the slots, if not theirs."""
    suffix, N, device = candidates.suffix, candidates.width, slots_TI.device
    pages, page_size = pages_read or candidates.pages
    paths = pages if suffix is None else suffix.pages.table
    visible, slices = (candidates.paged_T, candidates.path_T), scratch.counts.shape[1]
    scores, sample, listed, counts, every = scratch
    room = triton.next_power_of_2(max(sizes.room[0], sizes.room[1] * topk * (1 if N <= LONG else 2)))
    shared = {"LISTED": room, "BLOCK_N": sizes.select_block, "num_warps": sizes.select_warps, **chained(device)}
    filter_kernel[(queries, slices)](
        scores, sample, listed, counts, *visible, first, topk, scores.stride(0), sample.stride(0), EVERY=every,
        SAMPLE=sample_side(sample.shape[1]), **shared,
    )  # fmt: skip
    select_kernel[(queries, slices)](
        scores, listed, counts, *visible, candidates.rows_T, pages, paths, slots_TI, first, topk, scores.stride(0),
        pages.stride(0), paths.stride(0), slots_TI.stride(0), PAGE_SIZE=page_size,
        HAS_SUFFIX=suffix is not None, LOG_SLICES=triton.next_power_of_2(slices).bit_length() - 1, **shared,
    )  # fmt: skip


@lru_cache
def sample_step(N: int, topk: int, sizes: IndexerTiles) -> int:
    """How far apart the scores of a sample are: a power of two."""
    return triton.next_power_of_2(max(1, topk // sizes.sampled, -(-N // sizes.sample)))


def sample_side(M: int) -> int:
    """How many of M sampled scores are used: a power of two, which may leave out the last few (of 131,136 keys the last 64)."""
    side = triton.next_power_of_2(M)
    return side // 2 if M <= side // 2 * 65 // 64 else side
