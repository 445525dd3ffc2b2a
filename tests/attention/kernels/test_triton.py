"""What only our kernels can get wrong: poison, splits, strides, ragged tiles, scratch memory, policy.

test_backends.py holds them against the definition on every shape, test_triton_gpu.py on a GPU.  Without one they run here
under Triton's interpreter.

Shapes: B sequences, T queries, H heads, K kv heads, D head dim.
"""

import itertools

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment
from toolkit.kernels import DEVICE
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kernels import triton_backend
from specdec.attention.kernels.tiles_triton import MERGING, MergeTiles, merge_tiles, padded, paged_tiles, splits_for
from specdec.attention.kernels.triton_backend import TritonBackend, launch_paged, launch_suffix_merge
from specdec.attention.kinds import PLAIN
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.shared import SharedPrefix, split_shared
from specdec.attention.state import AttentionState, merge_all
from specdec.ops.rope import HeadPrep, Rotation

NAN = float("nan")
K, G, D, P = 2, 3, 24, 4
H = K * G
pytestmark = pytest.mark.usefixtures("poisoned_new_memory")  # an unwritten element that is read or returned shows


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def unrotated(tokens: int) -> HeadPrep:
    """No norm, and a table that turns nothing."""
    table = torch.stack((torch.ones(1, D), torch.zeros(1, D)), dim=1).to(DEVICE)
    return HeadPrep(Rotation(table, torch.zeros(tokens, dtype=torch.int64, device=DEVICE)), K)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def scattered(lens: list[int], seed: int, spare: int = 0) -> tuple[Tensor, MHAView]:
    """A page table in random order, and a cache that is NaN wherever no row may read.  Idle entries name page 0."""
    pages = Scattered(lens, P, extra=spare, spare=1, idle_is_dummy=True, seed=seed, device=DEVICE)
    return pages.table_BW, MHAView(pages.fill(2, K, D))


def check(out_THD: Tensor, q_THD: Tensor, view: MHAView, plan: AttentionPlan) -> None:
    want = attended(ReferenceBackend(), q_THD.double(), MHAView(view.kv.double()), plan)
    torch.testing.assert_close(out_THD.double(), want, atol=2e-5, rtol=2e-5)


def attend(q_THD: Tensor, view: MHAView, *segments: Segment, suffix: Segment | None = None, programs: int = 64) -> Tensor:
    backend = TritonBackend(programs)
    return attended(backend, q_THD, view, AttentionPlan(segments, suffix=suffix))


def suffix_rows(view: MHAView, counts: list[int], seed: int) -> Segment:
    """Rows of one query each over their own few finite slots.  Slots past a row's count hold NaN."""
    finite = view.kv.isfinite().all(-1).all(-1).all(-1)
    good, bad = finite.nonzero().flatten(), finite.logical_not().nonzero().flatten()
    width, generator = max(counts), torch.Generator().manual_seed(seed)
    table = bad[torch.randint(len(bad), (len(counts), width), generator=generator).to(DEVICE)]
    for row, n in zip(table, counts):
        row[:n] = good[torch.randperm(len(good), generator=generator)[:n].to(DEVICE)]
    rows = torch.arange(len(counts) + 1, dtype=torch.int32, device=DEVICE)
    return Segment(PageTable(table.int()), ints(*counts), rows, 1)


@pytest.mark.slow_cases
@pytest.mark.parametrize("queries", [1, 5])
def test_nan_in_unread_slots_stays_there(queries: int) -> None:
    """Keeps out: a masked key's value loaded all the same (0 times NaN).  Half-full pages and page 0 hold NaN."""
    lens = [0, 1, 7, 133]
    table, view = scattered(lens, seed=queries)
    q_THD = rand(len(lens) * queries, H, D, seed=3)
    segment = causal_segment(PageTable(table, P), ints(*lens), queries)
    check(attend(q_THD, view, segment), q_THD, view, AttentionPlan((segment,)))


def test_padded_rows_are_zero_and_harm_nobody() -> None:
    """Keeps out: a padded row (no keys, junk pages, NaN queries) that faults, or reaches the row beside it."""
    table, view = scattered([50, 9], seed=4)
    junk = torch.full((2, table.shape[1]), 2**30, dtype=torch.int32, device=DEVICE)
    lens, both = ints(50, 0, 9, 0), torch.stack([table[0], junk[0], table[1], junk[1]])
    q_THD = rand(8, H, D, seed=5)
    q_THD[2:4] = q_THD[6:8] = NAN
    prefix = prefix_segment(PageTable(both, P), lens, 2)
    suffix = suffix_rows(view, [1, 2, 0, 0, 2, 1, 0, 0], seed=6)
    out_THD = attend(q_THD, view, prefix, suffix=suffix)
    assert out_THD[2:4].eq(0).all() and out_THD[6:8].eq(0).all()
    live = [0, 1, 4, 5]
    two = prefix_segment(PageTable(table, P), ints(50, 9), 2)
    rows = Segment(PageTable(suffix.pages.table[live]), suffix.cache_seqlens[live], ints(0, 1, 2, 3, 4), 1)
    check(out_THD[live], q_THD[live], view, AttentionPlan((two,), suffix=rows))


@pytest.mark.slow_cases
@pytest.mark.parametrize("programs", [1, 8, 64, 10_000])
@pytest.mark.parametrize("with_suffix", [False, True])
def test_any_number_of_splits_gives_the_same(programs: int, with_suffix: bool) -> None:
    """Keeps out: a key read by two splits or none, and idle splits of short rows read as if they had written."""
    lens = [700, 3, 0]
    table, view = scattered(lens, seed=7)
    prefix = prefix_segment(PageTable(table, P), ints(*lens), 2)
    suffix = suffix_rows(view, [3, 1, 0, 2, 0, 9], seed=8) if with_suffix else None
    q_THD = rand(6, H, D, seed=9)
    out_THD = attend(q_THD, view, prefix, suffix=suffix, programs=programs)
    check(out_THD, q_THD, view, AttentionPlan((prefix,), suffix=suffix))


@pytest.mark.parametrize("with_suffix", [False, True])
def test_programs_of_a_merge_share_out_columns(with_suffix: bool) -> None:
    """Keeps out: columns of values that two programs write or none, and more splits than a program reads at once."""
    view, T, S = scattered([20], seed=7)[1], 6, 11
    suffix = suffix_rows(view, [3, 1, 0, 2, 0, 9], seed=8) if with_suffix else None
    q_THD, partial = rand(T, H, D, seed=9), AttentionState(rand(T, H, S, D, seed=10), rand(T, H, S, seed=11))
    partial.lse_TH[1:, :, 4:] = partial.lse_TH[2] = -torch.inf
    partial.out_THD[partial.lse_TH == -torch.inf] = NAN
    states = [
        AttentionState(out.where(lse[..., None] > -torch.inf, 0.0), lse) for out, lse in zip(*(x.unbind(2) for x in partial))
    ]
    want = merge_all([*states, ReferenceBackend().run(q_THD, view, suffix)] if suffix else states)
    for tiles in (MergeTiles(16, 2), MergeTiles(16, 16), MergeTiles(32, 4)):
        state = AttentionState.empty((T, H, D), torch.float32, DEVICE)
        launch_suffix_merge(q_THD, view, suffix, PLAIN, partial, None, state, True, None, tiles)
        torch.testing.assert_close(state.out_THD, want.out_THD, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(state.lse_TH, want.lse_TH, atol=2e-5, rtol=2e-5)


def test_tiles_of_a_merge_fit_a_warp() -> None:
    """Keeps out: registers that spill, columns that no program has, and more programs than the GPU runs at once."""
    for programs, splits, group, E in itertools.product(
        (1, 9, 64, 300, 5000), (0, 1, 3, 17, 33, 128), (1, 4, 8, 16), (16, 64, 128, 576)
    ):
        columns, chunk = merge_tiles(programs, splits, group, E)
        shared_out = padded(E) // columns
        assert padded(E) % columns == 0 and (columns >= 32 or shared_out == 1) and chunk & (chunk - 1) == 0
        assert chunk == 1 or chunk == 2 or chunk * group * columns <= 4096
        assert shared_out == 1 or programs * shared_out <= MERGING
    assert merge_tiles(32, 33, 1, 128) == MergeTiles(32, 64), "a query's splits are read at once"


def test_suffix_wider_than_a_chunk() -> None:
    """Keeps out: a suffix kernel that looks at its first few keys only."""
    table, view = scattered([90], seed=10)
    prefix, suffix = prefix_segment(PageTable(table, P), ints(20), 2), suffix_rows(view, [64, 33], seed=11)
    q_THD = rand(2, H, D, seed=12)
    check(attend(q_THD, view, prefix, suffix=suffix), q_THD, view, AttentionPlan((prefix,), suffix=suffix))


def test_ragged_tiles() -> None:
    """Keeps out: a tile that runs over its row's last query into the next row's (prompts of 1, 23, 0 and 40 tokens)."""
    lens = [1, 23, 0, 40]
    table, view = scattered(lens, seed=13)
    q_THD = rand(sum(lens), H, D, seed=14)
    segment = ragged_causal_segment(PageTable(table, P), lens, lens)
    check(attend(q_THD, view, segment), q_THD, view, AttentionPlan((segment,)))


def test_a_prompt_after_a_cached_prefix() -> None:
    """Keeps out: a causal corner taken at the top left (queries fewer than keys, of different counts a row)."""
    lens = [30, 45]
    table, view = scattered(lens, seed=15)
    segment = Segment(PageTable(table, P), ints(*lens), ints(0, 11, 15), 11, causal=True)
    q_THD = rand(15, H, D, seed=16)
    check(attend(q_THD, view, segment), q_THD, view, AttentionPlan((segment,)))


@pytest.mark.slow
def test_other_plans_are_merged_segment_by_segment() -> None:
    """Keeps out: a plan without a suffix taken for one with (paged segments that hold pages, or slots as a suffix does)."""
    lens = [21, 6]
    table, view = scattered(lens, seed=17)
    prefix = prefix_segment(PageTable(table, P), ints(*lens), 2)
    suffix = suffix_rows(view, [1, 2, 3, 0], seed=18)
    paged = causal_segment(PageTable(table, P), ints(*lens), 2)
    q_THD = rand(4, H, D, seed=19)
    for segments in ((prefix, paged), (suffix, prefix), (prefix, suffix), (prefix, suffix, paged), (suffix, suffix)):
        check(attend(q_THD, view, *segments), q_THD, view, AttentionPlan(segments))
        check(attend(q_THD, view, *segments, suffix=suffix), q_THD, view, AttentionPlan(segments, suffix=suffix))


def test_a_private_prefix_of_slots_is_no_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: with page size 1, a shared prefix and one query a row, a private prefix of any length read as if it were a
    suffix, by the one-warp kernel that takes 16 keys at a time."""
    table_BW = torch.randperm(400, generator=torch.Generator().manual_seed(30)).view(2, 200).int().to(DEVICE)
    table_BW[1, :150] = table_BW[0, :150]
    view, lens_B = MHAView(rand(400, 2, K, D, seed=31)), ints(200, 160)
    shared = SharedPrefix.empty(table_BW, max_queries=4)
    shared.set([0, 1], table_BW[0, :150].tolist(), 150)
    own = causal_segment(PageTable(table_BW), lens_B, 1)
    segments, launched, merged = split_shared(own, shared), [], []

    def spy(q_THD: Tensor, view: MHAView, segment: Segment, *rest: object) -> None:
        launched.append(segment)
        launch_paged(q_THD, view, segment, *rest)

    def spy_merge(q_THD: Tensor, view: MHAView, suffix: Segment | None, *rest: object) -> None:
        merged.append(suffix)
        launch_suffix_merge(q_THD, view, suffix, *rest)

    monkeypatch.setattr(triton_backend, "launch_paged", spy)
    monkeypatch.setattr(triton_backend, "launch_suffix_merge", spy_merge)
    q_THD = rand(2, H, D, seed=32)
    check(attend(q_THD, view, *segments), q_THD, view, AttentionPlan((own,)))
    assert len(segments) == 2 and launched == [*segments] and merged == [None]


def test_a_plan_refuses_a_suffix_of_pages() -> None:
    """Keeps out: a segment of pages, or of several queries a row, handed to the kernel that reads one query's slots."""
    table = torch.zeros(2, 3, dtype=torch.int32)
    prefix = prefix_segment(PageTable(table), torch.zeros(2, dtype=torch.int32), 1)
    for suffix in (
        causal_segment(PageTable(table, 4), prefix.cache_seqlens, 1),
        causal_segment(PageTable(table), prefix.cache_seqlens, 2),
    ):
        with pytest.raises(AssertionError, match="one query's slots"):
            AttentionPlan((prefix,), suffix=suffix)


def test_views_and_slices_need_no_copy() -> None:
    """Keeps out: strides taken for granted.  q is a slice of fused rows, the cache one layer of a transposed tensor."""
    lens = [37, 12]
    table, dense = scattered(lens, seed=20)
    layers = torch.full((*dense.kv.shape[:3], 2, D), NAN, device=DEVICE)
    layers[..., 1, :] = dense.kv
    view = MHAView(layers[..., 1, :])
    fused = rand(6, (H + 2 * K) * D, seed=21)
    q_THD = fused[:, : H * D].view(6, H, D)
    segment = causal_segment(PageTable(table, P), ints(*lens), 3)
    plan = AttentionPlan((segment,))
    check(attend(q_THD, view, segment), q_THD, view, plan)
    turned = q_THD.transpose(1, 2).contiguous().transpose(1, 2)  # the head dim is not the innermost
    check(attend(turned, view, segment), turned, view, plan)
    store_view, slots = MHAView(layers[..., 0, :]), torch.tensor([5, 3], device=DEVICE)
    qkv = rand(2, H + 2 * K, D, seed=22)
    TritonBackend().store(store_view, qkv.clone(), slots, unrotated(2))
    stored = qkv[:, H:].view(2, 2, K, D)
    assert torch.equal(store_view.kv[slots], stored) and layers[..., 0, :].isfinite().all(-1).sum() == 2 * 2 * K


@pytest.mark.slow
def test_layers_share_their_scratch() -> None:
    """Keeps out: one allocation a layer, and a layer that reads what the one before it left."""
    lens = [300, 2]
    table, view = scattered(lens, seed=23)
    other = MHAView(view.kv.flip(1))  # keys and values swapped: another layer
    prefix, suffix = prefix_segment(PageTable(table, P), ints(*lens), 2), suffix_rows(view, [1, 1, 2, 0], seed=24)
    plan = AttentionPlan((prefix,), suffix=suffix)
    backend = TritonBackend(64)
    prepared = backend.prepare(plan)
    for layer, seed in ((view, 25), (other, 26), (view, 27)):
        q_THD = rand(4, H, D, seed=seed)
        check(backend.attend(q_THD, layer, prepared).out_THD, q_THD, layer, plan)
    assert len(prepared._scratch) == 1


def test_no_queries_no_launch() -> None:
    table, view = scattered([5], seed=28)
    segment = Segment(PageTable(table, P), ints(5), ints(0, 0), 0, causal=True)
    assert attend(rand(0, H, D, seed=0), view, segment).shape == (0, H, D)
    TritonBackend().store(view, rand(0, H + 2 * K, D, seed=0), torch.zeros(0, dtype=torch.int64, device=DEVICE), unrotated(0))


def test_splits_fill_the_gpu_and_no_more() -> None:
    """Keeps out: batch 1 on eight of 264 places, a full batch split for nothing, splits of a few keys."""
    assert splits_for(8, 32_768, 128, 264) in (32, 33)
    assert splits_for(8, 1_024, 128, 264) == 8
    assert splits_for(256, 32_768, 128, 264) == 1 and splits_for(2000, 32_768, 128, 264) == 1
    assert splits_for(8, 0, 128, 264) == 1 and splits_for(8, 10, 128, 264) == 1
    for programs_per_split in range(1, 300):
        splits = splits_for(programs_per_split, 32_768, 128, 264)
        waves = programs_per_split * splits / 264
        assert 1 <= splits <= 128 and (splits in (1, 128) or waves / -(-waves // 1) > 0.75)


FORMATS = [
    (2, "", False), (4, "", False), (2, "fp8", False), (2, "int8", False), (4, "fp8", False), (2, "int8_keys", False),
    (2, "int8_keys", True), (4, "int8_keys", True), (2, "int8", True),
]  # fmt: skip


@pytest.mark.parametrize(("itemsize", "quant", "int8_queries"), FORMATS)
def test_tiles_fit_shared_memory(itemsize: int, quant: str, int8_queries: bool) -> None:
    """Keeps out: a head size that compiles only where nobody tried it (Hopper: 227 KiB a program)."""
    seqlen_q_packgqa, dims = (1, 4, 24, 64, 128, 240, 4096), (8, 24, 64, 80, 128, 256)
    for queries, head_dim, causal, waves, keys in itertools.product(
        seqlen_q_packgqa, dims, (False, True), (0.06, 2.0), (2048, 65536)
    ):
        tiles = paged_tiles(queries, head_dim, itemsize, quant, causal, waves, keys, int8_queries)
        row = padded(head_dim) * itemsize
        narrow = tiles.stages * padded(head_dim) + row  # 8-bit blocks, and one made wider
        key, value = narrow if quant else tiles.stages * row, narrow if quant in ("fp8", "int8") else tiles.stages * row
        case = (queries, head_dim, causal, waves, keys, tiles)
        assert tiles.block_m * row + tiles.block_n * (key + value) <= 227 * 1024, case
        assert tiles.block_m >= 16 and tiles.block_n >= 16, case
