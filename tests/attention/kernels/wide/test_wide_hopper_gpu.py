"""The kernels of wide_hopper.py and wide_many_hopper.py against float64 attention, where they are chosen and where a test
chooses their tiles.  Needs a Hopper GPU.

Shapes: B sequences, N queries of a sequence, T queries, K kv heads, D width of a key and E of a value, P page size, W pages of
a row.
"""

import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import triton
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.layout import CachedHeads
from specdec.attention.caches.split_cache import SplitLayout
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.tiles_triton import PagedTiles, splits_for
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kernels.wide import wide_hopper, wide_many_hopper
from specdec.attention.kernels.wide.wide_tiles import HOPPER_TILES, MANY_TILES, lies_on_pages, wide_hopper_tiles
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import Fresh, Segment

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
NAN = float("nan")
GEMMA, MIMO = (512, 512), (192, 128)


class Case(NamedTuple):
    """heads: kv heads, and query heads of each.  causal: else the queries of a row read all of it.  near: the most keys that a
    query reads, or 0 for all.
    """

    widths: tuple[int, int]
    lens: list[int]
    queries: int
    causal: bool
    heads: tuple[int, int] = (4, 8)
    page_size: int = 16
    fresh: Fresh = "queries"
    near: int = 0
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16


def world(case: Case) -> tuple[Tensor, CachedHeads, Segment]:
    """Queries, a cache in which every slot that nobody may read holds NaN, and the segment."""
    (D, E), (K, G), P, N, B = case.widths, case.heads, case.page_size, case.queries, len(case.lens)
    W = -(-max(case.lens) // P) + 1
    table = torch.randperm(B * W, device=DEVICE).int().view(B, W)
    lens_B = torch.tensor(case.lens, dtype=torch.int32, device=DEVICE)
    segment = (causal_segment if case.causal else prefix_segment)(PageTable(table, P), lens_B, N, case.fresh)
    rows = torch.full((B * W * P, K * (D + E)), NAN, dtype=case.dtype, device=DEVICE)
    starts_T = torch.zeros(B * N, dtype=torch.int32, device=DEVICE)
    for row, length in enumerate(case.lens):
        ends_N = torch.arange(length - N, length, device=DEVICE) + 1 if case.causal else torch.full((N,), length, device=DEVICE)
        if case.near:
            starts_T[row * N : (row + 1) * N] = (ends_N - case.near).clamp(min=0)
        first = int(starts_T[row * N]) if case.near else 0
        slots = segment.pages.slots_at(torch.arange(first, length, device=DEVICE).expand(B, -1))[row]
        rows[slots] = torch.randn(len(slots), K * (D + E), device=DEVICE).to(case.dtype)
    q_THD = torch.randn(B * N, (G + 2) * K, D, device=DEVICE).to(case.dtype)[:, : G * K]
    view = MHAView(rows.view(-1, 2, K, D)) if D == E else SplitLayout(K, D, E, case.dtype).view(0, {"kv": rows})
    return q_THD, view, replace(segment, starts_T=starts_T if case.near else None)


def check(case: Case, backend: TritonBackend) -> None:
    """Holds a backend against the definition in float64."""
    q_THD, view, segment = world(case)
    scoring = PLAIN if case.softcap is None else Scoring(softcap=case.softcap)
    got, want = backend.run(q_THD, view, segment, scoring), TorchBackend().run(q_THD.double(), view, segment, scoring)
    read = want.lse_TH > -float("inf")
    assert torch.equal(got.lse_TH > -float("inf"), read), case
    assert (got.out_THD[~read] == 0).all(), case
    assert (got.lse_TH[read] - want.lse_TH[read]).abs().max() < 2e-2 if read.any() else True, case
    bound = 2e-3 if case.dtype == torch.float16 else 1e-2
    assert (got.out_THD - want.out_THD).norm() <= bound * want.out_THD.norm(), case


@pytest.mark.parametrize("seed", range(6))
def test_random_segments_in_any_tiles(seed: int) -> None:
    """Keeps out: a panel that is fetched to the wrong place, a warpgroup that multiplies the other one's columns, weights that
    are overwritten while they are read, a wrong mask or split, and NaN of unread slots."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(8):
        widths, N = rng.choice([GEMMA, MIMO]), rng.choice([1, 3, 6, 32, 60, 200])
        causal, longest = rng.random() < 0.6, rng.choice([20, 300, 2500]) + N
        case = Case(
            widths, [rng.randint(N if causal else 0, longest) for _ in range(rng.choice([1, 2, 5]))], N, causal,
            (rng.choice([1, 2, 4]), rng.choice([1, 3, 6, 8, 16])), rng.choice([16, 32, 64, 128, 192]),
            rng.choice(["none", "queries", "all"]), rng.choice([0, 0, 1, 100, 700]), rng.choice([None, None, 20.0]),
            rng.choice([torch.bfloat16, torch.float16]),
        )  # fmt: skip
        check(case, InTheseTiles(some_tiles(rng, case), rng.choice([1, 40, 264])))


def some_tiles(rng: random.Random, case: Case) -> PagedTiles:
    """Of one kernel or the other, which read any number of rows."""
    least, is_mimo = rng.choice([32, 64, 128]), case.widths == MIMO
    if rng.random() < 0.4:
        return HOPPER_TILES[case.widths]._replace(block_n=rng.choice([32, 64]) if is_mimo else 32, min_split_keys=least)
    tiles = MANY_TILES[case.widths]._replace(min_split_keys=least)
    other = tiles._replace(block_n=128 if is_mimo else 32, stages=2)
    return rng.choice([tiles, other]) if lies_on_pages(other.block_n, case.page_size) else tiles


class InTheseTiles(TritonBackend):
    """The kernel of these tiles, whatever the rule says.  programs: for so many the splits are planned."""

    def __init__(self, tiles: PagedTiles, programs: int) -> None:
        super().__init__(programs)
        self.tiles, self.planned = tiles, programs

    def _tiles(self, q_THD: Tensor, view: CachedHeads, segment: Segment, scoring: Scoring) -> tuple[PagedTiles, int]:
        K, tiles = view.heads[0].shape[1], self.tiles
        num_tiles = triton.cdiv(segment.max_seqlen_q * triton.next_power_of_2(q_THD.shape[1] // K), tiles.block_m)
        programs = segment.rows * K * num_tiles * tiles.parts
        return tiles, splits_for(programs, segment.max_keys, tiles.min_split_keys, self.planned)


@pytest.mark.parametrize(
    "case",
    [
        Case(GEMMA, [1000] * 16, 1, True), Case(GEMMA, [1000], 6, True), Case(GEMMA, [0, 700], 6, False),
        Case(GEMMA, [3000], 32, False, fresh="none"), Case(GEMMA, [900], 128, True), Case(GEMMA, [700], 6, True, (1, 3)),
        Case(MIMO, [5000, 40], 1, True, (8, 8), near=128), Case(MIMO, [3000], 6, True, (4, 16)),
        Case(MIMO, [3000], 32, False, (4, 16), fresh="none"), Case(MIMO, [900], 128, True, (8, 8), near=128),
    ],
    ids=["16 rows", "chain", "empty row", "tree", "prompt", "groups of 3", "window", "MiMo chain", "MiMo tree", "MiMo prompt"],
)  # fmt: skip
def test_the_rule_s_own_choice(case: Case) -> None:
    """Keeps out: tiles of the rule that do not fit the GPU or compute something else; and that the kernel is never taken."""
    assert wide_hopper_tiles(*world(case), PLAIN, measured=True) is not None
    check(case, TritonBackend(hopper=True))  # on an H100 as well


@pytest.mark.parametrize(
    "case",
    [Case(GEMMA, [100], 6, True, page_size=8), Case(GEMMA, [100], 6, True, (1, 65)), Case((320, 320), [100], 6, True)],
    ids=["pages of 8", "groups of 65", "heads of 320"],
)
def test_what_the_kernel_cannot_read_goes_to_the_other_one(case: Case) -> None:
    """Keeps out: a page, a group or a head that TMA or the tensor cores cannot take."""
    q_THD, view, segment = world(case)
    assert wide_hopper_tiles(q_THD, view, segment, PLAIN, measured=True) is None
    check(case, TritonBackend(hopper=True))


@pytest.mark.parametrize(
    ("kernel", "tiles"),
    [
        (wide_hopper.wide_hopper_kernel, HOPPER_TILES[GEMMA]),
        (wide_many_hopper.wide_many_hopper_kernel, MANY_TILES[GEMMA]),
    ],
    ids=["few rows", "many rows"],
)
def test_one_compilation_serves_every_batch(kernel: Any, tiles: PagedTiles) -> None:
    """Keeps out: seconds of compiling in the middle of serving because a batch of 1 or 16 is special to Triton."""
    counts = []
    for lens in ([141], [701, 5], [300] * 16, [130]):
        check(Case(GEMMA, lens, 2, True), InTheseTiles(tiles, 264))
        counts.append(sum(len(cache[0]) for cache in kernel.device_caches.values()))
    assert len(set(counts)) == 1, counts
