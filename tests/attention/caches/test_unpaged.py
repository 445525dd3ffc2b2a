"""Caches that are not paged: a page is a whole sequence of more than 4,096 tokens, no power of two; a table has one entry.

Each kernel is held against the definition over such pages.  Keeps out: a block that is looked for on a second page, an offset
on a page that is masked as if pages were powers of two, a slot that is counted from the first page.

Shapes: T queries, H heads, K kv heads, D head dim, C latent rank, R rotated, P page size.
"""

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.attention.sparse import IndexWorld, same_rows
from toolkit.inside.interpreter import dot_exactly
from toolkit.kernels import DEVICE, HAS_GPU
from toolkit.oracles.reference import ReferenceBackend
from toolkit.trees import random_masks
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.layout import KVView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.invariant.backend import InvariantBackend
from specdec.attention.invariant.plan import MAX_COLUMNS, KVBlocks
from specdec.attention.kernels.tables_triton import launch_next_tokens
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.launch import launch_sparse_segment

P = 17 * 256
LENS = [4200, 70, 0]  # with 7 more tokens each
K, G, D, C, R, N = 1, 2, 16, 16, 8, 7
SCALE = Scoring(scale=0.3)
BACKENDS = {"torch": TorchBackend, "triton": lambda: TritonBackend(programs=64)}


def unpaged() -> Scattered:
    pages = Scattered(LENS, P, extra=N, seed=P, device=DEVICE)
    assert pages.table_BW.shape == (len(LENS), 1)
    return pages


def plan_of(kind: str, pages: Scattered) -> AttentionPlan:
    """The prefix and a tree of N nodes, or a chain of N tokens at the end; "window": a chain that reads its last 90 keys."""
    table = PageTable(pages.table_BW, P)
    if kind != "tree":
        plan = AttentionPlan((causal_segment(table, pages.lens_B + N, N),))
        return plan.local(LayerKind(90)) if kind == "window" else plan
    suffix = Segment.empty(len(LENS) * N, N, 1, device=DEVICE)
    fill_tree_suffix(suffix, pages.fresh_slots(), random_masks(len(LENS), N, 3).to(DEVICE))
    return AttentionPlan((prefix_segment(table, pages.lens_B, N),), suffix=suffix)


def check(backend: Backend, kind: str, latents: bool, dtype: torch.dtype, tolerance: float) -> None:
    pages = unpaged()
    buffer = pages.fill(C + R, dtype=dtype) if latents else pages.fill(2, K, D, dtype=dtype)
    q_THD = pages.randn(len(LENS) * N, 4 if latents else K * G, buffer.shape[-1], dtype=dtype)
    plan = plan_of(kind, pages)

    def view(of: Tensor) -> KVView:
        return MLAView(of, C) if latents else MHAView(of)

    got = attended(backend, q_THD, view(buffer), plan, SCALE)
    want = attended(ReferenceBackend(), q_THD.double(), view(buffer.double()), plan, SCALE)
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("backend", "kind", "latents"),
    [("torch", "tree", False), ("triton", "chain", False), ("triton", "window", False), ("triton", "tree", True)],
)
def test_backends_meet_the_definition(backend: str, kind: str, latents: bool) -> None:
    check(BACKENDS[backend](), kind, latents, torch.float32, 2e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize(("kind", "latents"), [("window", False), ("chain", True)])
def test_one_order_of_sums_meets_the_definition(kind: str, latents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        dot_exactly(monkeypatch)
    dtype = torch.bfloat16 if HAS_GPU else torch.float16
    check(InvariantBackend(64, KVBlocks(64, 2, MAX_COLUMNS if HAS_GPU else 16)), kind, latents, dtype, 1e-2)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["causal", "tree"])
def test_selection_meets_the_definition(kind: str) -> None:
    """The indexer's kernels, and the pure version, on its scores."""
    world = IndexWorld.make(kind, [4200, 70], 3, P, seed=2, device=DEVICE)
    with torch.no_grad():
        got = launch_sparse_segment(world.q_THD, world.w_TH, world.keys_XD, world.candidates, 40)
    same_rows(got, *world.segment_of(world.scores(torch.float32), 40))


def test_next_tokens_lie_on_the_one_page() -> None:
    pages = unpaged()
    table = PageTable(pages.table_BW, P)
    got = launch_next_tokens(table, pages.lens_B, N, False)
    assert torch.equal(got[1], pages.fresh_slots()) and torch.equal(table.slots_at(got[0]), got[1])
