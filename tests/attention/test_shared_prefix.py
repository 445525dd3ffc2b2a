"""Rows that begin with the same pages read them once: three states instead of two, and the same attention.

Keeps out: a shared page that is read twice or by a stranger, windows that forget where the shared part ends, a padded row that
turns the others into NaN.

Shapes: B sequences, n queries of each, H heads, K kv heads, D head dim.
"""

from typing import Any

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor

from specdec.attention.attend import make_backend
from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kinds import FULL, LayerKind
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment, last_positions
from specdec.attention.shared import SharedPrefix, split_shared
from specdec.batch.state import BatchState

KINDS = (FULL, LayerKind(window=3), LayerKind(window=14), LayerKind(chunk=5), LayerKind(chunk=64))


class World:
    """Four rows: two members that share `shared` tokens, one stranger, one of padding.  Unread slots hold NaN."""

    def __init__(self, page_size: int, shared: int, fresh: int, dtype: torch.dtype, device: str, kinds: Any = KINDS) -> None:
        self.page_size, self.fresh, self.device, self.dtype = page_size, fresh, device, dtype
        self.lens = [shared + 5, shared + 2 * page_size + 1, 9, 0]
        pages = Scattered(self.lens, page_size, extra=fresh, spare=1, seed=shared, device=device)
        self.table, self.lens_B = pages.table_BW, pages.lens_B
        self.table[3] = 0
        self.table[1, : shared // page_size] = self.table[0, : shared // page_size]
        self.cache = KVCache(HeadsLayout(2, 16, dtype), kinds, pages.num_slots, device=device)
        self.cache.buffers["kv"].copy_(pages.fill(len(kinds), 2, 2, 16, dtype=dtype).transpose(0, 1))
        state = BatchState.empty(4, self.table.shape[1], page_size=self.page_size, device=device)
        self.shared = SharedPrefix.empty(state.pages.table, 10)
        if shared:
            self.shared.set([0, 1], self.table[0, : shared // page_size].tolist(), shared)

    def plans(self, n: int, tree: bool) -> tuple[AttentionPlan, AttentionPlan]:
        """Two plans that read the same keys, one of them with a shared segment: for a chain, or for a prefix and suffixes."""
        if not tree:
            own = causal_segment(PageTable(self.table, self.page_size), self.lens_B + n, n)
            positions, suffix = last_positions(own), None
        else:
            own = prefix_segment(PageTable(self.table, self.page_size), self.lens_B, n)
            depth = torch.arange(n, device=self.device).clamp(max=2)
            positions = (self.lens_B.long()[:, None] + depth).flatten()
            at = self.lens_B[:, None, None] + torch.stack([torch.zeros_like(depth), depth], dim=1)  # the root, and itself
            pages = self.table.long().gather(1, (at // self.page_size).flatten(1).long()).view(at.shape)
            slots = (pages * self.page_size + at % self.page_size).flatten(0, 1).int()
            suffix = Segment.of_slots(slots, (depth.repeat(4) > 0).int() + 1, self.lens_B)
        plain, split = (AttentionPlan(split_shared(own, shared), positions, suffix) for shared in (None, self.shared))
        return plain, split

    def attend(self, backend: Backend, plan: AttentionPlan, q_THD: Tensor) -> list[Tensor]:
        """The output of each layer's queries."""
        return [
            attended(backend, q_THD, self.cache.view(layer), plan.local(kind)) for layer, kind in enumerate(self.cache.kinds)
        ]


@pytest.mark.slow_cases
@pytest.mark.parametrize("tree", [False, True], ids=["causal", "tree"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(("page_size", "shared"), [(1, 7), (4, 0), (4, 16), (16, 32)])
def test_shared_equals_unshared(page_size: int, shared: int, n: int, tree: bool) -> None:
    """Every layer kind; members, a stranger and a padded row; nothing shared at all is a case like any other."""
    torch.manual_seed(page_size + n)
    world = World(page_size, shared, n, torch.float64, "cpu")
    q = torch.randn(4 * n, 4, 16, dtype=torch.float64)
    plain, split = world.plans(n, tree)
    want = world.attend(ReferenceBackend(), plain, q)
    for backend in (ReferenceBackend(), TorchBackend()):
        for got, right, kind in zip(world.attend(backend, split, q), want, KINDS, strict=True):
            assert not got[: 3 * n].isnan().any()
            torch.testing.assert_close(got[: 3 * n], right[: 3 * n], atol=1e-10, rtol=1e-10, msg=f"{backend.name} {kind}")


@pytest.mark.slow_cases
@pytest.mark.parametrize(("n", "tree", "page_size", "shared"), [(1, False, 4, 16), (3, False, 16, 32), (3, True, 4, 16)])
def test_kernels_share(n: int, tree: bool, page_size: int, shared: int) -> None:
    """The triton backend: three states in one merge."""
    pytest.importorskip("triton")
    from specdec.attention.kernels.triton_backend import TritonBackend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(n)
    kinds = KINDS if device == "cuda" else KINDS[:2]
    world = World(page_size, shared, n, torch.float32, device, kinds)
    q = torch.randn(4 * n, 4, 16, device=device)
    plain, split = world.plans(n, tree)
    want = world.attend(ReferenceBackend(), plain, q)
    backend = TritonBackend(programs=32)
    for got, right in zip(world.attend(backend, split, q), want, strict=True):
        torch.testing.assert_close(got[: 3 * n], right[: 3 * n], atol=2e-5, rtol=2e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize("tree", [False, True], ids=["causal", "tree"])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_row_of_nan_spoils_no_other(name: str, tree: bool) -> None:
    """Keeps out: all sequences' keys in one product, where a hidden NaN of one of them reaches the others as 0 * NaN.  A row
    that does not speculate has such keys in the drafter's cache."""
    if name == "triton":
        pytest.importorskip("triton")
    device, kinds = ("cuda" if name == "triton" and torch.cuda.is_available() else "cpu"), KINDS[:2]
    torch.manual_seed(1)
    world = World(4, 16, 4, torch.float32, device, kinds)
    q = torch.randn(16, 4, 16, device=device)
    plain, split = world.plans(4, tree)
    want = world.attend(ReferenceBackend(), plain, q)
    own = world.table[2, : -(-world.lens[2] // 4)].long()  # the stranger's pages
    world.cache.buffers["kv"][:, (own[:, None] * 4 + torch.arange(4, device=device)).flatten()] = torch.nan
    q[8:12] = torch.nan
    for got, right in zip(world.attend(make_backend(name), split, q), want, strict=True):
        torch.testing.assert_close(got[:8], right[:8], atol=2e-5, rtol=2e-5)


def test_many_queries_read_as_ever() -> None:
    """Keeps out: one more launch a layer where arithmetic takes the time, as in the verification of a large tree."""
    world = World(4, 16, 4, torch.float64, "cpu")
    own = prefix_segment(PageTable(world.table, 4), world.lens_B, 11)
    assert split_shared(own, world.shared) == split_shared(own, None) == (own,)
    assert len(split_shared(prefix_segment(PageTable(world.table, 4), world.lens_B, 10), world.shared)) == 2


def test_nothing_is_read_twice() -> None:
    """The members' own tables hold junk where the members share pages."""
    world = World(4, 16, 4, torch.float64, "cpu")
    q = torch.randn(16, 4, 16, dtype=torch.float64)
    plain, _ = world.plans(4, tree=False)
    want = world.attend(ReferenceBackend(), plain, q)
    spare = world.table[1].clone()
    world.table[:2, :4] = 4 * world.table.shape[1]  # a page of NaN
    assert world.cache.buffers["kv"][:, 16 * world.table.shape[1]].isnan().all() and spare[0] != world.table[1, 0]
    _, split = world.plans(4, tree=False)
    for got, right in zip(world.attend(TorchBackend(), split, q), want, strict=True):
        torch.testing.assert_close(got[:12], right[:12], atol=1e-10, rtol=1e-10)
