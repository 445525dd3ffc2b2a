"""Latent attention against its definition: every head's keys and values written out, in float64.

Keeps out: absorbed and expanded paths that differ, tiles that lose a query or a split, trees of latents at any page size.

Shapes: T queries, H heads, C rank, R rotated, N not rotated, V values, L = C + R.
"""

import weakref

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment
from toolkit.kernels import DEVICE
from toolkit.oracles.attention import causal_mask, dense_attention
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import KVView
from specdec.attention.caches.mla_cache import LatentLayout, MLAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kernels.triton_plan import TritonPlan
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.latent.limits import LIMITS, Limits
from specdec.attention.latent.mla import LatentInputs, store_latent
from specdec.attention.latent.mla_launch import LatentTiles, attend_latent
from specdec.attention.latent.mla_store_triton import launch_store_latent
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState
from specdec.ops.products.numerics import FAST
from specdec.ops.rope import Rotation, rotary_table

NAN = float("nan")
C, R, N, V, H = 16, 8, 12, 10, 4
SCALE = Scoring(scale=0.3)
pytestmark = pytest.mark.usefixtures("poisoned_new_memory")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def scattered(
    lens: list[int], P: int, seed: int, dtype: torch.dtype = torch.float32, width: int = C + R
) -> tuple[Tensor, Tensor]:
    """A page table in random order, and latents that are NaN wherever no row may read."""
    pages = Scattered(lens, P, spare=1, idle_is_dummy=True, seed=seed, device=DEVICE)
    return pages.table_BW, pages.fill(width, dtype=dtype)


def suffix_rows(table: Tensor, lens: list[int], counts: list[int], P: int) -> Segment:
    """One-query rows of a tree: query q of a row reads counts[q] of the slots before lens, last first."""
    places = torch.tensor([[max(n - 1 - i, 0) for i in range(max(counts))] for n in lens], device=DEVICE)
    slots = PageTable(table, P).slots_at(places).repeat_interleave(len(counts), 0)
    return Segment.of_slots(slots.int(), ints(*(counts * len(lens))))


def check(
    backend: Backend,
    q_THL: Tensor,
    latent: Tensor,
    *segments: Segment,
    suffix: Segment | None = None,
    rank: int = C,
    tolerance: float = 2e-5,
) -> None:
    plan = AttentionPlan(segments, suffix=suffix)
    want = attended(ReferenceBackend(), q_THL.double(), MLAView(latent.double(), rank), plan, SCALE)
    got = attended(backend, q_THL, MLAView(latent, rank), plan, SCALE)
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


BACKENDS = [TorchBackend(), TritonBackend(programs=1), TritonBackend(programs=64)]


@pytest.mark.slow_cases
@pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "triton", "triton-split"])
@pytest.mark.parametrize(("P", "queries"), [(1, 1), (5, 6), (16, 3)])
def test_few_queries_meet_latents(backend: Backend, P: int, queries: int) -> None:
    """Chains at any page size.  Keeps out: keys past a chain's own token, empty rows of NaN, half-full pages read whole."""
    lens = [queries, 7, 133, 0]
    table, latent = scattered(lens, P, seed=P)
    q_THL = rand(len(lens) * queries, H, C + R, seed=2)
    check(backend, q_THL, latent, causal_segment(PageTable(table, P), ints(*lens), queries))


@pytest.mark.slow_cases
@pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "triton", "triton-split"])
@pytest.mark.parametrize("P", [1, 5, 16])
def test_trees_meet_latents(backend: Backend, P: int) -> None:
    """Prefix, and rows of slots.  Keeps out: a suffix merged without the splits, a node that reads its neighbour's row."""
    lens, counts = [90, 5, 20], [1, 2, 3, 2]
    table, latent = scattered([n + 3 for n in lens], P, seed=20 + P)
    q_THL = rand(len(lens) * len(counts), H, C + R, seed=3)
    suffix = suffix_rows(table, [n + 3 for n in lens], counts, P)
    check(backend, q_THL, latent, prefix_segment(PageTable(table, P), ints(*lens), len(counts)), suffix=suffix)


@pytest.mark.slow_cases
@pytest.mark.parametrize("backend", BACKENDS[1:], ids=["triton", "triton-split"])
def test_shared_prefixes_and_windows(backend: Backend) -> None:
    """Three states, and first keys.  Keeps out: a segment's states written over another's; masked blocks that make NaN."""
    table, latent = scattered([64, 64], 16, seed=5)
    q_THL = rand(6, H, C + R, seed=6)
    shared = Segment(PageTable(table[:1], 16), ints(48), ints(0, 6), 6, False)
    own = Segment(PageTable(table[:, 3:], 16), ints(9, 1), ints(0, 3, 6), 3, False)
    check(backend, q_THL, latent, shared, own, suffix=suffix_rows(table, [64, 64], [1, 2, 2], 16))
    positions = torch.tensor([48, 49, 50] * 2, device=DEVICE)
    chain = causal_segment(PageTable(table, 16), ints(51, 51), 3).local(LayerKind(window=20), positions)
    tree = suffix_rows(table, [54, 54], [1, 2, 3], 16)
    check(backend, q_THL, latent, chain)
    prefix = prefix_segment(PageTable(table, 16), ints(51, 51), 3).local(LayerKind(window=4), positions + 3)
    starts = Segment(tree.pages, tree.cache_seqlens, tree.cu_seqlens_q, 1, starts_T=ints(0, 1, 1, 0, 0, 3))
    check(backend, q_THL, latent, prefix, suffix=starts)
    unread = PageTable(table, 16).slots_at(torch.arange(29, device=DEVICE).expand(2, 29)).flatten()
    check(backend, q_THL, latent.index_fill(0, unread, NAN), chain)  # keys before all windows may be overwritten


def test_odd_sizes_are_padded() -> None:
    """Keeps out: a rank or rotated dim that is no power of two, whose padding is read or written."""
    table, latent = scattered([40, 3], 5, seed=7, width=24 + 6)
    q_THL = rand(4, 3, 30, seed=8)
    suffix = suffix_rows(table, [40, 3], [2, 1], 5)
    check(TritonBackend(8), q_THL, latent, prefix_segment(PageTable(table, 5), ints(38, 1), 2), suffix=suffix, rank=24)


class KeysAsRows(TritonBackend):
    def attend(self, q_THD: Tensor, view: KVView, prepared: TritonPlan, scoring: Scoring = PLAIN) -> AttentionState:
        assert isinstance(view, MLAView)
        tiles = LatentTiles(16, 32, 4, 2, 32, swap_ab=True)
        return attend_latent(q_THD, view, prepared, scoring, 1000, tiles)


@pytest.mark.slow_cases
@pytest.mark.parametrize("P", [5, 32])
def test_keys_are_rows_of_the_products(P: int) -> None:
    """SWAP_AB, as tiles of few rows have it on Hopper GPUs: chains, windows, prefixes, more splits than a merge loads at once.

    Keeps out: a mask or a reduction along the other axis; pages of a later block; outputs of idle splits (NaN) that are added.
    """
    backend, lens = KeysAsRows(), [1300, 3, 70, 3]
    table, latent = scattered(lens, P, seed=P)
    for queries in (1, 3):
        q_THL = rand(4 * queries, H, C + R, seed=2)
        check(backend, q_THL, latent, causal_segment(PageTable(table, P), ints(1300, 3, 70, 0), queries))
    positions = torch.tensor([[n - 3 + i for i in range(3)] for n in lens], device=DEVICE).flatten()
    check(backend, q_THL, latent, causal_segment(PageTable(table, P), ints(*lens), 3).local(LayerKind(window=50), positions))
    suffix = suffix_rows(table, lens, [1, 2, 2], P)
    check(backend, q_THL, latent, prefix_segment(PageTable(table, P), ints(1290, 0, 64, 0), 3), suffix=suffix)


# ---- layers ----


def prep(positions_T: Tensor, dtype: torch.dtype) -> LatentPrep:
    table = rotary_table(100.0 ** -(torch.arange(R // 2) / (R // 2)), 256).to(DEVICE, dtype)
    return LatentPrep(Rotation(table, positions_T.to(DEVICE)), 1 + 0.1 * rand(C, seed=1, dtype=dtype), 1e-6)


def dense(q_THQ: Tensor, latent_TL: Tensor, up_HXC: Tensor, how: LatentPrep) -> Tensor:
    """One prompt by the definition: every head's keys and values, a causal mask, a softmax."""
    latent_TL, q_THQ = latent_TL.clone(), q_THQ.clone()
    latent_TL = how.apply_(q_THQ[..., N:], latent_TL)
    k_THN, v_THV = torch.einsum("tc,hxc->thx", latent_TL[:, :C], up_HXC).split((N, V), -1)
    k_THQ = torch.cat((k_THN, latent_TL[:, None, C:].expand(-1, H, -1)), -1)
    return dense_attention(q_THQ, k_THQ, v_THV, causal_mask(len(q_THQ), len(q_THQ), DEVICE), SCALE)[0].to(q_THQ.dtype)


def passes(backend: Backend, dtype: torch.dtype, pieces: list[list[tuple[int, int]]], P: int, limits: Limits) -> None:
    """Runs prompts in passes of (start, end) for each and holds every pass against the whole prompts' dense attention."""
    ends = [row[-1][1] for row in zip(*pieces)]
    pages = max(-(-n // P) for n in ends)
    table = torch.randperm(len(ends) * pages, generator=torch.Generator().manual_seed(P)).view(-1, pages).int().to(DEVICE)
    cache = KVCache(LatentLayout(C, R, dtype), [FULL], len(ends) * pages * P, device=DEVICE)
    cache.buffers["latent"].fill_(NAN)
    up_HXC = rand(H, N + V, C, seed=9, dtype=dtype) / C**0.5
    whole = [(rand(n, H, N + R, seed=n, dtype=dtype), rand(n, C + R, seed=n + 1, dtype=dtype)) for n in ends]
    want = [dense(*row, up_HXC, prep(torch.arange(n), dtype)) for row, n in zip(whole, ends)]
    for parts in pieces:
        positions = [torch.arange(*part) for part in parts]
        slots = [PageTable(row[None], P).slots_at(place[None].to(DEVICE))[0] for row, place in zip(table, positions)]
        lens = [len(place) for place in positions]
        segment = ragged_causal_segment(PageTable(table, P), lens, [end for _, end in parts])
        last = ragged_causal_segment(PageTable(table, P), [1] * len(parts), [end for _, end in parts])
        attn = PagedAttention(backend, cache, PassTables(AttentionPlan((segment,)), torch.cat(slots), AttentionPlan((last,))))
        how = prep(torch.cat(positions), dtype)
        rows_R = torch.tensor(lens, device=DEVICE).cumsum(0) - 1
        for rows in (None, rows_R):
            q_THQ = torch.cat([q[a:b] for (q, _), (a, b) in zip(whole, parts)])
            latent_TL = torch.cat([latent[a:b] for (_, latent), (a, b) in zip(whole, parts)])
            out = attn(0, LatentInputs(q_THQ, latent_TL, up_HXC, how, FAST, limits), rows, SCALE)
            expected = torch.cat([out_THV[a:b] for out_THV, (a, b) in zip(want, parts)])
            tolerance = 1e-10 if dtype == torch.float64 else 3e-5
            torch.testing.assert_close(out, expected if rows is None else expected[rows], atol=tolerance, rtol=tolerance)


PIECES = [
    [[(0, 30), (0, 11)]],  # whole prompts
    [[(0, 9), (0, 9)], [(9, 31), (9, 14)], [(31, 33), (14, 15)]],  # chunks of long ones and rests
    [[(0, 4), (0, 9), (0, 1)], [(4, 30), (9, 12), (1, 2)]],  # what is cached differs from row to row
]


@pytest.mark.parametrize("above", [0, 8, 256])
@pytest.mark.parametrize("pieces", PIECES, ids=["whole", "chunks", "ragged"])
@pytest.mark.parametrize("P", [1, 5, 16])
def test_absorbed_equals_expanded(above: int, pieces: list, P: int) -> None:
    """Keeps out: a chunk of a cached prefix read twice or not at all; rows that take another's; a scale of the wrong dim."""
    passes(TorchBackend(), torch.float64, pieces, P, Limits(expand_above=above, expanded_tokens=10))


@pytest.mark.slow
@pytest.mark.parametrize("above", [8, 256])
def test_prompts_through_the_kernels(above: int) -> None:
    """Keeps out: padded values (NaN) that reach an output; chunks without a key."""
    with torch.inference_mode():
        passes(TritonBackend(4), torch.float32, PIECES[2], 5, Limits(expand_above=above, expanded_tokens=12))


def test_the_store_kernel_does_what_its_definition_does() -> None:
    """Keeps out: halves swapped, a norm over the rotated part, queries written to the wrong head."""
    T = 7
    q_THQ, latent_TL = rand(T, 5, N + R, seed=1), rand(T, 30 + C + R, seed=2)[:, 30:]
    slots_T, how = (
        torch.tensor([3, 9, 0, 4, 5, 11, 2], device=DEVICE),
        prep(torch.tensor([0, 5, 9, 1, 2, 250, 30]), torch.float32),
    )
    want, got = (MLAView(torch.full((12, C + R), NAN, device=DEVICE), C) for _ in range(2))
    out = torch.full((T, 5, C + R), NAN, device=DEVICE)
    launch_store_latent(got, q_THQ[..., N:], latent_TL, slots_T, how, out[..., C:])
    with torch.enable_grad():  # the definition, on a GPU too
        store_latent(want, q_THQ[..., N:], latent_TL.clone(), slots_T, how)
    torch.testing.assert_close(got.latent, want.latent, equal_nan=True)
    torch.testing.assert_close(out[..., C:], q_THQ[..., N:])
    assert out[..., :C].isnan().all()


def test_a_pass_is_freed_with_its_last_reader() -> None:
    """Keeps out: a circle of pass and latent attention, which holds scratch memory until Python looks for circles."""
    cache = KVCache(LatentLayout(C, R, torch.float32), [FULL], 8, device=DEVICE)
    segment = ragged_causal_segment(PageTable(torch.zeros(1, 8, dtype=torch.int32, device=DEVICE)), [4], [4])
    attn = PagedAttention(TorchBackend(), cache, PassTables(AttentionPlan((segment,)), torch.arange(4, device=DEVICE)))
    inputs = LatentInputs(
        rand(4, H, N + R, seed=1),
        rand(4, C + R, seed=2),
        rand(H, N + V, C, seed=3),
        prep(torch.arange(4), torch.float32),
        FAST,
        LIMITS,
    )
    attn(0, inputs, None, SCALE)
    gone = weakref.ref(attn)
    del attn
    assert gone() is None


def test_moving_takes_latents_along() -> None:
    """Keeps out: a commit that moves half a latent, or reads what it has written."""
    cache = KVCache(LatentLayout(C, R, torch.float32), [FULL] * 2, 8, device=DEVICE)
    cache.buffers["latent"].copy_(rand(2, 8, C + R, seed=1))
    before = cache.buffers["latent"].clone()
    cache.move(torch.tensor([[5, 2, 7, 0]], device=DEVICE), torch.tensor([[0, 2, 3]], device=DEVICE))
    assert cache.buffers["latent"][:, [5, 2, 7]].equal(before[:, [5, 7, 0]])
