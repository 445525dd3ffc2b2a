"""Sparse attention's kernels at DeepSeek's shape on a GPU, in bf16: scores against float64, and the selection exactly.

Keeps out: a score that depends on which kernel made it, slots nobody may read (NaN there), a tie that the order of programs
decides, a captured graph that keeps the lengths of its capture.
"""

from dataclasses import replace

import pytest
import torch
from toolkit.attention.sparse import IndexWorld, same_rows
from toolkit.inside.captures import capturing
from torch import Tensor

from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kinds import Scoring
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.segment import sparse_segment

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_new_memory")]
SHAPE = {"heads": 64, "dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
TOPK = 2048


def kernel_scores(world: IndexWorld, topk: int) -> Tensor:
    """[T, N]: what the score kernels leave."""
    from specdec.attention.sparse.launch import IndexerTiles, launch_scores

    args = (world.q_THD, world.w_TH, world.keys_XD, world.candidates, topk, 0, world.q_THD.shape[0], IndexerTiles(), 132)
    return launch_scores(*args).scores


def in_small_rooms(world: IndexWorld) -> Segment:
    """The selection by programs that have too little room for many rows' lists, and read all scores again."""
    from specdec.attention.sparse.launch import IndexerTiles, launch_sparse_segment

    sizes = IndexerTiles(select_block=1024, select_warps=4, room=(1024, 0))
    return launch_sparse_segment(world.q_THD, world.w_TH, world.keys_XD, world.candidates, TOPK, sizes)


@pytest.mark.parametrize("distinct", [0, 50, 1])
@pytest.mark.parametrize(
    ("kind", "n", "page_size"),
    [("causal", 1, 64), ("causal", 1, 9216), ("causal", 1, 80), ("causal", 6, 16), ("ragged", 70, 64), ("tree", 12, 1)],
)
def test_selection_at_the_real_shape(kind: str, n: int, page_size: int, distinct: int) -> None:
    """Keeps out: a wrong k-th score, ties by anything but position, NaN from slots that nobody may read."""
    world = IndexWorld.make(kind, [9000, 2048, 70, 2500, 4097], n, page_size, distinct=distinct, **SHAPE)
    with torch.no_grad():
        results = [sparse_segment(world.q_THD, world.w_TH, world.keys_XD, world.candidates, TOPK), in_small_rooms(world)]
        scores = kernel_scores(world, TOPK)
    visible_T = world.candidates.visible_T
    many_T = visible_T > TOPK
    visible_TN = torch.arange(scores.shape[1], device="cuda") < visible_T[:, None]
    near = (scores.double() - world.scores()).abs()[visible_TN & many_T[:, None]]
    assert many_T.any() and near.max() < 2e-4, near.max()
    want = world.segment_of(torch.where(many_T[:, None], scores, 0.0), TOPK)
    for got in results:
        same_rows(got, *want)


def test_trees_and_chains_score_alike() -> None:
    """The path of a tree's node, stored as a chain, has the same scores bit for bit.  Keeps out: other orders of summation."""
    n, length = 7, 5000
    tree = IndexWorld.make("tree", [length], n, 64, **SHAPE)
    path = [0, 2, 6]
    tree_scores = kernel_scores(tree, TOPK)
    keys = torch.cat((tree.keys_XD[tree.all_slots()[0][6, : length + 3]], tree.keys_XD[:61]))
    table = torch.arange(keys.shape[0] // 64, device="cuda").int()[None]
    for many in (True, False):
        rows = path if many else path[-1:]
        lens = torch.tensor([length + 3], dtype=torch.int32, device="cuda")
        cu = torch.tensor([0, len(rows)], dtype=torch.int32, device="cuda")
        chain = Segment(PageTable(table, 64), lens, cu, len(rows), causal=many)
        world = IndexWorld(tree.q_THD[rows], tree.w_TH[rows], keys, AttentionPlan((chain,)))
        scores = kernel_scores(world, TOPK)
        for i, node in enumerate(rows):
            seen = length + path.index(node) + 1
            assert torch.equal(scores[i, :seen], tree_scores[node, :seen])


@pytest.mark.parametrize("small_rooms", [True, False])
def test_a_captured_graph_follows_the_lengths(small_rooms: bool) -> None:
    """Keeps out: sizes read from the device while capturing; counts or lists left over from the replay before."""
    world = IndexWorld.make("causal", [9000, 3000, 5000], 1, 64, **SHAPE)
    lens_B = world.plan.segments[0].cache_seqlens

    def run() -> tuple[Tensor, Tensor]:
        if small_rooms:
            got = in_small_rooms(world)
        else:
            got = sparse_segment(world.q_THD, world.w_TH, world.keys_XD, world.candidates, TOPK)
        return got.pages.table, got.cache_seqlens

    with torch.no_grad():
        run()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            slots, counts = run()
        for lens in ([9000, 3000, 5000], [2049, 17, 4999], [0, 3000, 2048], [9000, 1, 5000]):
            lens_B.copy_(torch.tensor(lens))
            graph.replay()
            got = run()
            same_rows(replace(world.plan.segments[0], pages=PageTable(slots), cache_seqlens=counts), *got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 8, 66])
def test_latents_of_rows(rows: int, dtype: torch.dtype) -> None:
    """Attention over rows of slots against float64, in many splits, a few, and one.

    Keeps out: slots read past a row's count, empty rows that are not 0, a split that the merge forgets.
    """
    from specdec.attention.kernels.triton_backend import TritonBackend

    torch.manual_seed(rows)
    counts_T = torch.tensor([2048, 0, 1, 64, 65, 700, 2047, 129, 1000, 63, 128], dtype=torch.int32, device="cuda")
    counts_T = counts_T.repeat(6)[:rows]
    slots_TI = torch.randperm(rows * 2500, device="cuda")[: rows * 2048].view(rows, 2048).int()
    read = torch.arange(2048, device="cuda") < counts_T[:, None]
    latent = torch.full((rows * 2500, 576), torch.nan, dtype=dtype, device="cuda")
    latent[slots_TI[read].long()] = torch.randn(int(read.sum()), 576, dtype=dtype, device="cuda")
    slots_TI[~read] = 2**31 - 1
    q_THL = torch.randn(rows, 128, 576, dtype=dtype, device="cuda")
    segment, scoring, oracle = Segment.of_slots(slots_TI, counts_T), Scoring(scale=0.1), TorchBackend()
    with torch.no_grad():
        got = TritonBackend().run(q_THL, MLAView(latent, 512), segment, scoring)
    exact = MLAView(latent.double(), 512)
    for start in range(0, rows, 8):
        part = slice(start, start + 8)
        rows_8 = Segment.of_slots(torch.where(read, slots_TI, 0)[part], counts_T[part])
        want = oracle.run(q_THL[part].double(), exact, rows_8, scoring)
        assert (got.out_THD[part].double() - want.out_THD).norm() / want.out_THD.norm() < 5e-3
        torch.testing.assert_close(got.lse_TH[part].double(), want.lse_TH.double(), atol=1e-2, rtol=1e-2)
