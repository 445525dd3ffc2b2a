"""Attention over heads of 512, and over keys of 192 with values of 128: 16 and 8 bits, windows, sinks, trees, chains, prompts.

The Triton kernels are compared with the definition in float64, over caches that hold NaN wherever nobody may read.  Without a
GPU they run in the interpreter.

Shapes: B sequences, N queries of each, H heads, K kv heads, D key dim, E value dim.
"""

from dataclasses import replace

import pytest
import torch
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment
from toolkit.kernels import DEVICE
from toolkit.oracles.reference import ReferenceBackend
from toolkit.trees import mask_of

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.int8_keys import INT8_KEYS, Int8KeysLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import CachedHeads
from specdec.attention.caches.quant_cache import QuantLayout
from specdec.attention.caches.split_cache import PairedView, SplitLayout
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment

BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PARENTS = [0, 0, 1, 1, 3]  # of a tree's nodes
LENS = [41, 0, 9]
SIZES = {"512": (1, 4, 512, 512), "192/128": (2, 3, 192, 128), "320": (1, 2, 320, 320)}  # K, G, D, E


def plan_of(shape: str, pages: Scattered, N: int) -> AttentionPlan:
    table = PageTable(pages.table_BW, pages.page_size)
    if shape == "prompts":
        lens = [n + N for n in LENS]
        positions_T = torch.cat([torch.arange(n, device=DEVICE) for n in lens])
        return AttentionPlan((ragged_causal_segment(table, lens, lens),), positions_T)
    if shape == "chain":
        return AttentionPlan((causal_segment(table, pages.lens_B + N, N, "queries"),))
    mask_NN = mask_of(PARENTS).to(DEVICE)
    suffix = replace(Segment.empty(len(LENS) * N, int(mask_NN.sum(1).max()), 1, device=DEVICE), base_B=pages.lens_B)
    fill_tree_suffix(suffix, pages.fresh_slots(), mask_NN.expand(len(LENS), N, N))
    positions_T = (pages.lens_B.long()[:, None] + mask_NN.sum(1) - 1).flatten()
    return AttentionPlan((prefix_segment(table, pages.lens_B, N),), positions_T, suffix)


def compare(pages: Scattered, view: CachedHeads, H: int, D: int, plan: AttentionPlan, scoring: Scoring, programs: int) -> None:
    """Holds the kernels against the definition over the same view, in the dtype of `pages`' last numbers."""
    dtype = view.heads[1].dtype if view.quant in ("", INT8_KEYS) else torch.float16
    T = int(plan.segments[0].cu_seqlens_q[-1])
    q_THD = pages.randn(T, H, D, dtype=dtype) / 2
    backend, oracle = TritonBackend(programs), ReferenceBackend()
    got = backend.attend_with_sinks(q_THD, view, backend.prepare(plan), scoring)
    want = oracle.attend_with_sinks(q_THD.double(), view, oracle.prepare(plan), scoring)
    size_E = want.out_THD.abs().amax((0, 1)).clamp(min=1e-3)
    torch.testing.assert_close(got.out_THD.double() / size_E, want.out_THD / size_E, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


@pytest.mark.slow_cases(keep=8)
@pytest.mark.parametrize(
    ("dtype", "programs"),
    [(torch.float32, 6), (torch.float16, 200), pytest.param(torch.bfloat16, 200, marks=pytest.mark.gpu)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", [FULL, LayerKind(window=7)], ids=["full", "window"])
@pytest.mark.parametrize(("shape", "page_size"), [("tree", 1), ("tree", 16), ("chain", 4), ("prompts", 16)])
@pytest.mark.parametrize("size", SIZES)
def test_against_the_definition(
    size: str, shape: str, page_size: int, kind: LayerKind, dtype: torch.dtype, programs: int
) -> None:
    """Keeps out: columns of a wide head that no program reads, a value read with a key's stride, a sink that a windowed layer
    forgets, NaN of an unread slot."""
    K, G, D, E = SIZES[size]
    pages = Scattered(LENS, page_size, extra=len(PARENTS), seed=page_size, device=DEVICE)
    rows = pages.fill(K * (D + E), dtype=dtype)
    view: CachedHeads = MHAView(rows.unflatten(1, (2, K, D))) if D == E else SplitLayout(K, D, E, dtype).view(0, {"kv": rows})
    sinks = Scoring(softcap=5.0, sinks_H=pages.randn(K * G)) if shape != "prompts" else PLAIN
    for scoring in (PLAIN, sinks) if kind == FULL else (sinks,):
        compare(pages, view, K * G, D, plan_of(shape, pages, len(PARENTS)).local(kind), scoring, programs)


@pytest.mark.slow_cases(keep=6)
@pytest.mark.parametrize("shape", ["tree", "chain", "prompts"])
@pytest.mark.parametrize("kept", ["fp8", "int8", "int8 queries", INT8_KEYS, f"{INT8_KEYS} queries"])
def test_heads_of_512_in_8_bits(kept: str, shape: str) -> None:
    """Keeps out: scales of another head or token, and columns that are not dequantised."""
    (K, G, D), (kv_cache_dtype, *rounds) = (2, 4, 512), kept.split()
    pages = Scattered(LENS, 16, extra=len(PARENTS), seed=3, device=DEVICE)
    if kv_cache_dtype == INT8_KEYS:
        layout: QuantLayout | Int8KeysLayout = Int8KeysLayout(K, D, torch.float16, bool(rounds))
    else:
        layout = QuantLayout(kv_cache_dtype, K, D, DEVICE, int8_queries=bool(rounds))
    cache = KVCache(layout, (FULL,), pages.num_slots, device=DEVICE)
    for buffer in cache.buffers.values():
        buffer.view(torch.uint8).fill_(0xFF)  # NaN in float8 and as scales
    view = cache.view(0)
    assert isinstance(view, CachedHeads) and hasattr(view, "write")
    slots_N = torch.cat([pages.slots(row, 0, n + pages.extra) for row, n in enumerate(LENS)])
    view.write(slots_N, pages.randn(len(slots_N), 2, K, D, dtype=torch.float16))
    compare(pages, view, K * G, D, plan_of(shape, pages, len(PARENTS)), PLAIN, 6)


def test_pairs_of_heads_of_256() -> None:
    """Keeps out: differential attention whose pairs are as wide as no other head, with registers for half of one."""
    K, G, D = 2, 2, 256
    pages = Scattered(LENS, 16, extra=len(PARENTS), seed=5, device=DEVICE)
    view, plan = PairedView(pages.fill(2, K, D)), plan_of("tree", pages, len(PARENTS))
    compare(pages, view, K * G, D, plan, PLAIN, 6)
