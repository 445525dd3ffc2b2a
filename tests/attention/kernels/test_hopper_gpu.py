"""paged_hopper.py's kernel against float64 attention, where it is chosen and where a test chooses it.  Needs a Hopper GPU.

Shapes: B sequences, N queries of a sequence, T queries, H heads, K kv heads, D head dim, P page size, W pages of a row.
"""

import random
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels import hopper_tiles, paged_hopper, triton_backend
from specdec.attention.kernels.tiles_triton import PagedTiles
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import Fresh, Segment

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
NAN = float("nan")


class Case(NamedTuple):
    """group: query heads of a kv head.  causal: else the queries of a row read all of it.  near: the most keys that a query
    reads, or 0 for all.
    """

    lens: list[int]
    queries: int
    causal: bool
    heads: tuple[int, int, int] = (8, 4, 128)  # kv heads, group, head dim
    page_size: int = 16
    fresh: Fresh = "queries"
    near: int = 0
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16


def world(case: Case) -> tuple[Tensor, MHAView, Segment]:
    """Queries, a cache in which every slot that nobody may read holds NaN, and the segment."""
    (K, G, D), P, N, B = case.heads, case.page_size, case.queries, len(case.lens)
    W = -(-max(case.lens) // P) + 1
    table = torch.randperm(B * W, device=DEVICE).int().view(B, W)
    lens_B = torch.tensor(case.lens, dtype=torch.int32, device=DEVICE)
    segment = (causal_segment if case.causal else prefix_segment)(PageTable(table, P), lens_B, N, case.fresh)
    kv = torch.full((B * W * P, 2, K, D), NAN, dtype=case.dtype, device=DEVICE)
    starts_T = torch.zeros(B * N, dtype=torch.int32, device=DEVICE)
    for row, length in enumerate(case.lens):
        ends_N = torch.arange(length - N, length, device=DEVICE) + 1 if case.causal else torch.full((N,), length, device=DEVICE)
        if case.near:
            starts_T[row * N : (row + 1) * N] = (ends_N - case.near).clamp(min=0)
        first = int(starts_T[row * N]) if case.near else 0
        slots = segment.pages.slots_at(torch.arange(first, length, device=DEVICE).expand(B, -1))[row]
        kv[slots] = torch.randn(len(slots), 2, K, D, device=DEVICE).to(case.dtype)
    q_THD = torch.randn(B * N, (G + 2) * K, D, device=DEVICE).to(case.dtype)[:, : G * K]
    return q_THD, MHAView(kv), replace(segment, starts_T=starts_T if case.near else None)


def check(case: Case, backend: TritonBackend) -> None:
    """Holds a backend against the definition in float64."""
    q_THD, view, segment = world(case)
    scoring = PLAIN if case.softcap is None else Scoring(softcap=case.softcap)
    got, want = backend.run(q_THD, view, segment, scoring), TorchBackend().run(q_THD.double(), view, segment, scoring)
    read = want.lse_TH > -float("inf")
    assert torch.equal(got.lse_TH > -float("inf"), read), case
    assert (got.out_THD[~read] == 0).all(), case
    assert (got.lse_TH[read] - want.lse_TH[read]).abs().max() < 2e-2 if read.any() else True, case
    norm = want.out_THD.norm()
    assert (got.out_THD - want.out_THD).norm() <= (2e-3 if case.dtype == torch.float16 else 1e-2) * norm, case


def check_with(tiles: PagedTiles, programs: int, case: Case) -> None:
    """`check`, with these tiles whatever the rule says.  programs: for so many the splits are planned."""
    with mock.patch.object(triton_backend, "hopper_tiles", lambda *_: tiles):
        check(case, TritonBackend(programs))


@pytest.mark.parametrize("seed", range(6))
def test_random_segments_in_any_tiles(seed: int) -> None:
    """Keeps out: a page that is fetched to the wrong place, a mask or a split that is wrong, and NaN of unread slots."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(8):
        D, N = rng.choice([64, 128, 256]), rng.choice([1, 3, 6, 32, 60, 200])
        causal, longest = rng.random() < 0.6, rng.choice([20, 300, 2500]) + N
        case = Case(
            [rng.randint(N if causal else 0, longest) for _ in range(rng.choice([1, 2, 5]))], N, causal,
            (rng.choice([1, 2, 8]), rng.choice([1, 2, 3, 4, 6, 8]), D), rng.choice([16, 32, 64, 128, 192]),
            rng.choice(["none", "queries", "all"]), rng.choice([0, 0, 1, 100, 700]), rng.choice([None, None, 20.0]),
            rng.choice([torch.bfloat16, torch.float16]),
        )  # fmt: skip
        block_m, block_n = 64 if D == 256 else rng.choice([64, 128]), 32 if D == 256 else rng.choice([32, 64])
        registers = 168 if block_m == 128 else 232 if D == 256 else 128
        stages, least, joined = rng.choice([2, 3]), rng.choice([32, 64, 128]), rng.choice([False, True])
        tiles = PagedTiles(block_m, block_n, block_m // 16, stages, least, registers, hopper=True, joined=joined)
        check_with(tiles, rng.choice([1, 40, 264]), case)


@pytest.mark.parametrize(
    "case",
    [
        Case([1000] * 16, 1, True), Case([1000], 6, True), Case([0, 700], 6, False), Case([5000, 40], 1, True, near=1),
        Case([3000], 32, False, fresh="none"), Case([900], 128, True), Case([40, 5, 700], 3, True, (8, 8, 64)),
        Case([700, 900], 6, True, (8, 2, 256)), Case([900], 6, True, (4, 6, 256)),
        Case([5000], 60, False, fresh="none"), Case([800, 300], 6, True, near=128),
        Case([40_000, 33], 6, True, page_size=40_192), Case([40_000], 32, False, page_size=40_192),
    ],
    ids=[
        "16 rows", "chain", "empty row", "window of 1", "tree of 32", "prompt", "heads of 64", "heads of 256", "groups of 6",
        "tree of 60",
        "window of 128", "unpaged chain", "unpaged tree",
    ],
)  # fmt: skip
def test_the_rule_s_own_choice(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: tiles of the rule that do not fit the GPU or compute something else; and that the kernel is never taken."""
    taken: list[int] = []
    launch = paged_hopper.launch_paged_hopper
    monkeypatch.setattr(paged_hopper, "launch_paged_hopper", lambda *args: (taken.append(1), launch(*args)))
    check(case, TritonBackend(hopper=True))  # on an H100 as well
    assert taken == [1]


@pytest.mark.parametrize("hopper", [False, True])
def test_unpaged_rows_beyond_the_reach_of_32_bits(hopper: bool) -> None:
    """Fourteen caches of 40,000 tokens hold more than 2**31 numbers.  Keeps out: an offset in them that is no 64-bit number."""
    case = Case([40_000 - 13 * row for row in range(14)], 1, True, page_size=40_192)
    check(case, TritonBackend(hopper=hopper))


@pytest.mark.parametrize(
    "case",
    [Case([100], 6, True, page_size=8), Case([100], 6, True, (2, 65, 128)), Case([100], 6, True, (2, 4, 96))],
    ids=["pages of 8", "groups of 65", "heads of 96"],
)
def test_what_the_engine_cannot_bring_goes_to_the_other_kernel(case: Case) -> None:
    """Keeps out: a page, a group or a head that TMA or the tensor cores cannot take."""
    q_THD, view, segment = world(case)
    assert hopper_tiles.hopper_tiles(q_THD, view, segment, PLAIN, 132, measured=True) is None
    check(case, TritonBackend(hopper=True))


def test_one_compilation_serves_every_batch() -> None:
    """Keeps out: seconds of compiling in the middle of serving because a batch of 1 or 16 is special to Triton."""
    tiles, counts = PagedTiles(64, 64, 4, 2, 64, 128, hopper=True), []
    for lens in ([141], [701, 5], [300] * 16, [130]):
        check_with(tiles, 264, Case(lens, 2, True))
        counts.append(sum(len(cache[0]) for cache in paged_hopper.paged_hopper_kernel.device_caches.values()))
    assert len(set(counts)) == 1, counts
