"""The kernels of sparse attention against the definition, on small random inputs.

Keeps out: a tile, slice or list that loses a key at its edge; ties by anything but position; NaN from slots nobody may read.
"""

import pytest
import torch
from toolkit.attention.sparse import IndexWorld, same_rows
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.indexer import select_rows, to_slots
from specdec.attention.sparse.launch import (
    IndexerTiles,
    Scratch,
    launch_best_keys,
    launch_scores,
    launch_selection,
    launch_sparse_segment,
)
from specdec.attention.sparse.segment import pure_best_keys, pure_segment

pytestmark = pytest.mark.usefixtures("poisoned_new_memory")
TINY = IndexerTiles(
    single_block=16, multi_block=16, multi_warps=4, max_queries=3, min_queries=2, select_block=32, select_slices=1, sampled=4,
    room=(32, 2),
)  # fmt: skip
ONE_LIST = TINY._replace(room=(16, 1))
KINDS = [("causal", 1), ("causal", 5), ("ragged", 4), ("tree", 7)]


def lens_of(kind: str) -> list[int]:
    """Lengths around the tiles' edges; a tree may stand at the beginning of its sequence."""
    return [70, 0, 16, 33] if kind == "tree" else [70, 5, 16, 33]


def launched(world: IndexWorld, topk: int, sizes: IndexerTiles, scratch: int = 1 << 20) -> Segment:
    with torch.no_grad():
        args = (world.q_THD, world.w_TH, world.keys_XD, world.candidates, topk)
        return launch_sparse_segment(*args, sizes, programs=4, scratch_bytes=scratch)


def kernel_scores(world: IndexWorld, topk: int, sizes: IndexerTiles) -> Tensor:
    with torch.no_grad():
        T = world.q_THD.shape[0]
        args = (world.q_THD, world.w_TH, world.keys_XD, world.candidates, topk, 0, T)
        return launch_scores(*args, sizes, 4).scores


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kind", "n"), KINDS)
@pytest.mark.parametrize("page_size", [1, 16, 64, 80])
def test_scores_meet_the_definition(kind: str, n: int, page_size: int, dtype: torch.dtype) -> None:
    """Every visible score, at any page size.  Keeps out: paths scored at another place, heads or dims of padding that count."""
    world = IndexWorld.make(kind, lens_of(kind), n, page_size, heads=3, dim=12, dtype=dtype, seed=n, device=DEVICE)
    scores, want = kernel_scores(world, 1, TINY), world.scores()
    visible_T = world.candidates.visible_T
    seen_TN = torch.arange(scores.shape[1], device=DEVICE) < torch.where(visible_T > 1, visible_T, 0)[:, None]
    torch.testing.assert_close(scores[seen_TN].double(), want[seen_TN], atol=2e-5, rtol=2e-5)


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize(  # any two of the kind, distinct scores, topk and sizes meet
    ("kind", "n", "distinct", "topk", "sizes"),
    [
        (*kind, 3 * ((i + j) % 2), topk, (TINY, ONE_LIST)[(i // 2 + j) % 2])
        for i, kind in enumerate(KINDS)
        for j, topk in enumerate((10, 32, 200))
    ],
)
def test_selection_is_exact(kind: str, n: int, distinct: int, topk: int, sizes: IndexerTiles) -> None:
    """The kernels' own scores, selected by the definition.  Keeps out: ties, short and long lists, slices that overlap."""
    world = IndexWorld.make(kind, lens_of(kind), n, 5, distinct=distinct, seed=topk, device=DEVICE)
    scores = torch.where(world.candidates.visible_T[:, None] > topk, kernel_scores(world, topk, TINY), 0.0)
    want = world.segment_of(scores, topk)
    same_rows(launched(world, topk, sizes), *want)


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize(("kind", "n"), KINDS[:3])
@pytest.mark.parametrize(("topk", "distinct"), [(10, 3), (32, 0), (200, 0)])
def test_best_keys_meet_the_definition(kind: str, n: int, topk: int, distinct: int) -> None:
    """Keeps out: scores that nobody computed, since the query selects all of its keys; slots where positions belong."""
    world = IndexWorld.make(kind, lens_of(kind), n, 5, distinct=distinct, seed=topk, device=DEVICE)
    args = (world.q_THD, world.w_TH, world.keys_XD, world.candidates, topk)
    with torch.no_grad():
        found_TI, positions_TI = launch_best_keys(*args, TINY, programs=4, scratch_bytes=1 << 13)
    want_TI, by_definition_TI = pure_best_keys(*args)
    if not distinct:  # where many scores tie, rounding decides
        assert torch.equal(positions_TI, by_definition_TI)
    valid_TI = positions_TI >= 0
    assert torch.equal(valid_TI, by_definition_TI >= 0) and not bool(found_TI.isnan().any())
    scores = world.scores()
    got = scores.gather(1, positions_TI.clamp(min=0).long())[valid_TI]
    torch.testing.assert_close(found_TI[valid_TI].double(), got, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found_TI.where(valid_TI, 0).sum(1), want_TI.where(valid_TI, 0).sum(1), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_scores_of_any_size(weight: float) -> None:
    """All equal, tiny, huge and undefined scores.  Keeps out: bins of an infinite range, a search that never ends."""
    world = IndexWorld.make("causal", [70, 33], 1, 5, seed=4, device=DEVICE)
    world.w_TH.mul_(weight)
    scores = kernel_scores(world, 10, TINY)
    same_rows(launched(world, 10, TINY), *world.segment_of(scores, 10))
    if weight == 0.0:
        slots, _ = world.all_slots()
        same_rows(launched(world, 10, TINY), slots[:, :10].int(), torch.full((2,), 10, device=DEVICE))


@pytest.mark.slow_cases
@pytest.mark.parametrize("case", ["best at the sampled places", "best elsewhere", "in one slice", "all equal"])
def test_the_sample_may_mislead(case: str) -> None:
    """Lists that are too short, too long or empty in most slices.  Keeps out: a result that depends on what was sampled."""
    world = IndexWorld.make("causal", [400, 390], 1, 5, seed=9, device=DEVICE)
    candidates, topk, sizes = world.candidates, 32, TINY._replace(room=(32, 1))
    T, N, every = 2, candidates.width, 8
    scores = torch.rand(T, N, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    sampled = torch.arange(N, device=DEVICE) % every == 0
    if case == "best at the sampled places":
        scores += 2.0 * sampled
    elif case == "best elsewhere":
        scores += 2.0 * ~sampled
    elif case == "in one slice":
        scores[:, 100:140] += 2.0
    else:
        scores.fill_(1.0)
    slots, counts = (torch.full(shape, -1, dtype=torch.int32, device=DEVICE) for shape in ((T, topk), (T, 5, 2)))
    scratch = Scratch(scores, scores[:, ::every].contiguous(), torch.full_like(scores, -1, dtype=torch.int32), counts, every)
    with torch.no_grad():
        launch_selection(candidates, topk, 0, T, scratch, slots, sizes)
    same_rows(Segment.of_slots(slots, candidates.counts_T(topk)), *world.segment_of(scores, topk))


@pytest.mark.slow_cases
@pytest.mark.parametrize(("kind", "n"), [("ragged", 4), ("tree", 7)])
def test_queries_in_parts(kind: str, n: int) -> None:
    """Few bytes of scratch.  Keeps out: a part of the queries scored at another's place, groups that begin in the wrong row."""
    world = IndexWorld.make(kind, lens_of(kind)[:2], n, 5, seed=6, device=DEVICE)
    whole = launched(world, 10, TINY)
    bytes_a_query = 9 * world.candidates.width
    for queries in (1, 3) if kind == "ragged" else (5,):
        parts = launched(world, 10, TINY, scratch=queries * bytes_a_query)
        same_rows(parts, whole.pages.table, whole.cache_seqlens)


def test_padding_tokens_select_nothing() -> None:
    """Tokens after the last row.  Keeps out: padding that reads a row, a count that nobody wrote."""
    world = IndexWorld.make("ragged", [40, 30], 3, 5, seed=7, device=DEVICE)
    more = IndexWorld(world.q_THD.repeat(2, 1, 1), world.w_TH.repeat(2, 1), world.keys_XD, world.plan)
    T, got, want = world.q_THD.shape[0], launched(more, 10, TINY), launched(world, 10, TINY)
    assert got.cache_seqlens[T:].eq(0).all() and got.rows == 2 * T
    same_rows(want, got.pages.table[:T], got.cache_seqlens[:T])


def test_the_choice_of_sizes_for_float32() -> None:
    """The sizes that small models get.  Keeps out: sizes that only the tests above use."""
    world = IndexWorld.make("tree", [40, 3], 7, 16, seed=8, device=DEVICE)
    scores = world.scores().nan_to_num(-1).float()
    with torch.no_grad():
        got = launch_sparse_segment(world.q_THD, world.w_TH, world.keys_XD, world.candidates, 9)
    same_rows(got, *world.segment_of(scores, 9))


@pytest.mark.parametrize("kind", ["causal", "ragged"])
def test_selected_slots_are_those_of_the_copy(kind: str) -> None:
    """By kernels, and by the definition.  Keeps out: scores of keys that are looked for in the copy."""
    world = IndexWorld.make(kind, [70, 5, 16, 33], 4, 5, seed=3, device=DEVICE)
    copy = PageTable(torch.randperm(4 * 9, device=DEVICE).view(4, 9).int(), 8)
    candidates = CandidateKeys.of(world.plan, world.q_THD.shape[0], copy)
    positions_TI = select_rows(world.scores(torch.float32), candidates.visible_T, 10)
    want = to_slots(positions_TI, copy, candidates.rows_T, candidates.paged_T)
    with torch.no_grad():
        for select in (launch_sparse_segment, pure_segment):
            same_rows(select(world.q_THD, world.w_TH, world.keys_XD, candidates, 10), *want)
