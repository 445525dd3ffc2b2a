"""Suffixes that the paged kernel reads beside the prefix, against the definition.  Under Triton's interpreter without a GPU.

Shapes: B rows of N queries, H heads, K kv heads, D head dim, W the most keys of a suffix.
"""

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.kernels import DEVICE
from toolkit.oracles.reference import ReferenceBackend

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kernels import triton_backend
from specdec.attention.kernels.tiles_triton import PagedTiles
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.pages import PageTable
from specdec.attention.plan import prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState

NAN = float("nan")
P = 4


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output and scratch tensor starts as NaN: an unwritten element that is read or returned shows."""

    def nan_state(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> AttentionState:
        out = torch.full(shape, NAN, dtype=dtype, device=device)
        return AttentionState(out, torch.full(shape[:-1], NAN, dtype=torch.float32, device=device))

    monkeypatch.setattr(AttentionState, "empty", nan_state)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("tiles", [(16, 32, 1), (32, 16, 3), (32, 32, 4), (64, 32, 2)])
@pytest.mark.parametrize(
    ("lens", "counts", "H", "K"),
    [([21, 90, 0], [[1, 2, 3], [5, 0, 1], [2, 1, 3]], 8, 2), ([60], [[9, 1, 17, 4, 0, 2, 33, 6, 8]], 8, 4),
     ([0, 7], [[0, 0], [3, 2]], 16, 2)],
)  # fmt: skip
def test_equals_the_definition(
    lens: list[int], counts: list[list[int]], H: int, K: int, tiles: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: a query that reads another one's suffix, more keys than a block has, none, or slots after its own, which hold
    NaN; a prefix that is divided among one program too many; padded rows that are not 0.
    """
    B, N, D = len(lens), len(counts[0]), 16
    pages = Scattered(lens, P, extra=0, spare=12, idle_is_dummy=True, seed=1, device=DEVICE)
    view = MHAView(pages.fill(2, K, D))
    finite = view.kv.isfinite().flatten(1).all(1)
    good, bad = finite.nonzero().flatten(), finite.logical_not().nonzero().flatten()
    flat = [count for row in counts for count in row]
    slots_TW = bad[torch.randint(len(bad), (B * N, max(flat))).to(DEVICE)].int()
    for row, count in zip(slots_TW, flat):
        row[:count] = good[torch.randint(len(good), (count,)).to(DEVICE)].int()
    suffix = Segment(PageTable(slots_TW), ints(flat), ints([*range(B * N + 1)]), 1)
    plan = AttentionPlan((prefix_segment(PageTable(pages.table_BW, P), ints(lens), N),), suffix=suffix)
    q_THD = torch.randn(B * N, H, D).to(DEVICE)
    block_m, block_n, splits = tiles
    monkeypatch.setattr(TritonBackend, "_tiles", lambda *_: (PagedTiles(block_m, block_n, 4, 2, least=block_n), splits))
    merged, plain = [], triton_backend.launch_suffix_merge
    monkeypatch.setattr(
        triton_backend, "launch_suffix_merge", lambda q, v, own, *rest: (merged.append(own), plain(q, v, own, *rest))
    )
    got = attended(TritonBackend(16), q_THD, view, plan)
    assert merged == [None], "the paged kernel did not read the suffix"
    want = attended(ReferenceBackend(), q_THD.double(), MHAView(view.kv.double()), plan)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


def test_long_prefixes_and_other_groups_keep_their_own_launch() -> None:
    """Keeps out: a suffix in blocks that don't hold as many keys of each query, and slower blocks of a long prefix."""
    backend, lens = TritonBackend(16), ints([5])
    for heads, width, joins in ((4, 8, True), (6, 8, False), (4, 2000, False)):
        view = MHAView(torch.zeros(40, 2, 2, 16, device=DEVICE))
        prefix = prefix_segment(PageTable(torch.zeros(1, width, dtype=torch.int32, device=DEVICE), P), lens, 3)
        suffix = Segment.of_slots(torch.zeros(3, 2, dtype=torch.int32, device=DEVICE), ints([1, 1, 1]))
        q_THD = torch.zeros(3, heads, 16, device=DEVICE)
        assert backend._joins(q_THD, view, (prefix,), suffix, triton_backend.PLAIN) == joins
