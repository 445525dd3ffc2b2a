"""What only a GPU shows of our attention kernels: half precision, captured graphs, compilations, and chained launches.

Shapes: B sequences, L prefix length, N queries of a sequence, T queries, H heads, K kv heads, D head dim.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.segments import ragged_causal_segment
from toolkit.inside.captures import capturing
from toolkit.trees import mask_of
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.int8_keys import Int8KeysLayout, Int8KeysView
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.quant_cache import QuantView, to_fp8, to_int8
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels import hopper_tiles, triton_backend
from specdec.attention.kernels.tables_triton import launch_last_positions
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import (
    causal_segment,
    fill_tree_suffix,
    prefix_segment,
)
from specdec.attention.segment import AttentionPlan, Segment
from specdec.ops import launch
from specdec.ops.launch import chained
from specdec.ops.rope import HeadPrep, Rotation, rotary_table

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
NAN = float("nan")
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm(out - ref) / norm(ref)


class World(NamedTuple):
    """lens_B: what the plan reads; slots_T: where this pass's tokens stand."""

    plan: AttentionPlan
    view: MHAView | QuantView | Int8KeysView
    q_THD: Tensor
    lens_B: Tensor
    slots_T: Tensor
    table: Tensor


def world(
    kind: str,
    B: int,
    L: int,
    N: int,
    P: int = 16,
    heads: tuple[int, int, int] = (32, 8, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> World:
    """tree: prefix and suffix; chain: N causal queries; prompts: L causal queries (N ignored).  Pages lie scattered."""
    H, K, D = heads
    width = -(-(L + N) // P)
    table = torch.randperm(B * width, device=DEVICE).view(B, width).int()
    lens_B = torch.full((B,), L, dtype=torch.int32, device=DEVICE)
    first = L if kind == "tree" else L - N
    slots_BN = PageTable(table, P).slots_at((first + torch.arange(N, device=DEVICE)).expand(B, N))
    kv = torch.randn(B * width * P, 2, K, D, device=DEVICE, dtype=dtype)
    queries = L if kind == "prompts" else N
    q_THD = torch.randn(B * queries, H, D, device=DEVICE, dtype=dtype)
    if kind == "prompts":
        plan = AttentionPlan((ragged_causal_segment(PageTable(table, P), [L] * B, [L] * B),))
    elif kind == "chain":
        plan = AttentionPlan((causal_segment(PageTable(table, P), lens_B, N),))
    else:
        mask = mask_of([0, *((n - 1) // 2 for n in range(1, N))])
        suffix = replace(Segment.empty(B * N, int(mask.sum(1).max()), 1, device=DEVICE), base_B=lens_B)
        fill_tree_suffix(suffix, slots_BN, mask.to(DEVICE).expand(B, N, N))
        positions_T = (L + mask.sum(1) - 1).repeat(B).to(DEVICE)
        plan = AttentionPlan((prefix_segment(PageTable(table, P), lens_B, N),), positions_T, suffix)
    return World(plan, MHAView(kv), q_THD, lens_B, slots_BN.flatten(), table)


def in_8_bit(view: MHAView, kept: str) -> QuantView | Int8KeysView:
    """kept: a kv_cache_dtype, followed by " queries" if queries are rounded to int8 too."""
    slots, _, K, D = view.kv.shape
    kv_cache_dtype, int8_queries = kept.removesuffix(" queries"), kept.endswith(" queries")
    if kv_cache_dtype == "int8_keys":
        keys = KVCache(Int8KeysLayout(K, D, view.kv.dtype, int8_queries), [FULL], slots, device=DEVICE).view(0)
        keys.write(torch.arange(slots, device=DEVICE), view.kv)
        assert isinstance(keys, Int8KeysView)
        return keys
    if kv_cache_dtype == "fp8":
        scale_2K = torch.rand(2, view.kv.shape[2], device=DEVICE) * 0.02 + 0.01
        return QuantView(to_fp8(view.kv, scale_2K), scale_2K=scale_2K)
    stored, scales_N2K = to_int8(view.kv)
    return QuantView(stored, scales_N2K=scales_N2K, int8_queries=int8_queries)


def error(out_THD: Tensor, w: World, scoring: Scoring = PLAIN) -> float:
    oracle = TorchBackend()
    want = attended(oracle, w.q_THD.double(), w.view, w.plan, scoring)
    return float((out_THD.double() - want).norm() / want.norm())


def attend(w: World, scoring: Scoring = PLAIN) -> Tensor:
    backend = TritonBackend()
    return attended(backend, w.q_THD, w.view, w.plan, scoring)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        ("tree", 1, 1000, 6), ("tree", 1, 32_771, 32), ("tree", 9, 700, 60, 1), ("chain", 1, 1000, 1),
        ("chain", 3, 5000, 6, 64), ("prompts", 3, 777, 0), ("chain", 2, 130, 5, 4, (6, 2, 24)),
        ("tree", 2, 130, 5, 4, (8, 1, 80)),
        ("tree", 3, 500, 7, 4, (4, 2, 256)),
    ],
    ids=str,
)  # fmt: skip
def test_against_float64(case: tuple, dtype: torch.dtype) -> None:
    """Keeps out: a tile, a layout or a precision that is wrong only in compiled code.  Interpreted runs see none of it."""
    w = world(*case, dtype=dtype)
    assert error(attend(w), w) < BOUNDS[dtype]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8", "int8_keys", "int8_keys queries"])
@pytest.mark.parametrize("layer", [FULL, LayerKind(window=128), LayerKind(chunk=700)], ids=str)
@pytest.mark.parametrize(
    "case", [("tree", 2, 3000, 32), ("tree", 3, 1500, 6, 5), ("chain", 2, 3000, 6), ("prompts", 2, 900, 0)], ids=str
)
def test_kinds_against_float64(case: tuple, layer: LayerKind, kv_cache_dtype: str) -> None:
    """Keeps out: first keys, sinks, softcaps and 8-bit values that are wrong in compiled code only."""
    w = world(*case)
    w = w._replace(view=w.view if kv_cache_dtype == "auto" else in_8_bit(w.view, kv_cache_dtype))
    if case[0] == "prompts":
        w = w._replace(plan=replace(w.plan, positions_T=torch.arange(case[2], device=DEVICE).repeat(case[1])))
    w = w._replace(plan=w.plan.local(layer))
    scoring = PLAIN if layer is FULL else Scoring(0.1, 20.0, torch.randn(32, device=DEVICE))
    assert error(attend(w, scoring), w, scoring) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("kept", ["int8_keys", "int8_keys queries", "int8 queries"])
@pytest.mark.parametrize(
    "case",
    [
        ("chain", 3, 700, 1), ("tree", 2, 300, 32), ("chain", 2, 130, 5, 4, (6, 2, 24)), ("tree", 2, 130, 40, 4, (6, 2, 24)),
        ("tree", 2, 130, 5, 4, (8, 1, 80)), ("chain", 3, 500, 7, 4, (4, 2, 256)), ("prompts", 2, 300, 0, 1, (8, 2, 64)),
    ],
    ids=str,
)  # fmt: skip
def test_int8_keys_with_poison(case: tuple, kept: str) -> None:
    """Keeps out: products of int8 whose side is too short, tiles of other head dims, and a slot that nobody may read."""
    w = world(*case)
    kind, B, L, N = case[:4]
    view = in_8_bit(w.view, kept)
    unread = torch.ones(len(view.kv), dtype=torch.bool, device=DEVICE)
    reads = torch.arange(L, device=DEVICE).expand(B, L)
    unread[PageTable(w.table, case[4] if len(case) > 4 else 16).slots_at(reads).flatten()] = False
    if kind == "tree":
        unread[w.slots_T] = False
    view.kv.view(torch.uint8)[unread] = 255
    scales = view.scales_NK if isinstance(view, Int8KeysView) else view.scales_N2K
    assert scales is not None
    scales[unread] = NAN
    assert error(attend(w._replace(view=view)), w._replace(view=view)) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("kept", ["fp8", "int8_keys", "int8_keys queries"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e5])
def test_queries_of_any_size_meet_8_bit_keys(size: float, kept: str) -> None:
    """Keeps out: bfloat16 queries beyond float16's range, and a row of NaN (padding) that reaches the rows of its tile."""
    w = world("chain", 1, 500, 6)
    w = w._replace(view=in_8_bit(w.view, kept), q_THD=w.q_THD * size)
    scoring = Scoring(scale=0.1 / size)
    broken = w.q_THD.clone()
    broken[2, 5] = NAN
    out_THD = attend(w._replace(q_THD=broken), scoring)
    out_THD[2, 5] = attend(w, scoring)[2, 5]
    assert error(out_THD, w, scoring) < BOUNDS[torch.bfloat16]


def test_a_captured_window_follows_the_lengths() -> None:
    """Keeps out: first keys frozen at capture, or read before the kernel that writes them is done."""
    w = world("chain", 3, 3000, 6)
    backend, layer = TritonBackend(), LayerKind(window=300)

    def step() -> Tensor:
        return attended(backend, w.q_THD, w.view, w.plan.local(layer))

    step()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        out_THD = step()
    for lens in ((3000, 299, 6), (1200, 2999, 400), (300, 301, 302)):
        w.lens_B.copy_(torch.tensor(lens))
        out_THD.fill_(NAN)
        graph.replay()
        assert error(out_THD, w._replace(plan=w.plan.local(layer))) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_captured_graph_follows_the_lengths(kind: str) -> None:
    """Keeps out: a length, a split's range or a scratch address frozen at capture."""
    w = world(kind, 2, 2000, 2, heads=(6, 2, 24), dtype=torch.float32)
    backend = TritonBackend()

    def layers() -> list[Tensor]:
        prepared = backend.prepare(w.plan)
        return [backend.attend(w.q_THD, w.view, prepared).out_THD for _ in range(3)]

    w.lens_B.fill_(3)
    layers()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        outs = layers()
    for lens in ((2000, 1000), (5, 2), (64, 999)):
        w.lens_B.copy_(torch.tensor(lens))
        for out in outs:
            out.fill_(NAN)
        graph.replay()
        for out in outs:
            assert error(out, w) < 1e-5


@pytest.mark.parametrize("make", [causal_segment, prefix_segment], ids=["causal", "prefix"])
def test_one_compilation_serves_every_batch(make: Callable[..., Segment]) -> None:
    """Keeps out: seconds of compiling in the middle of serving because a batch of 1 or 16 is special to Triton."""
    counts = []
    for B, L in ((1, 40), (2, 700), (16, 16), (1, 1)):
        w = world("chain", B, L + 1, 2, P=4, heads=(6, 2, 24), dtype=torch.float32)
        attend(w._replace(plan=AttentionPlan((make(PageTable(w.table, 4), w.lens_B, 2),))))
        kernel = triton_backend.paged_attention_kernel
        counts.append(sum(len(cache[0]) for cache in kernel.device_caches.values()))
    assert len(set(counts)) == 1, counts


@triton.jit
def overwrite_kernel(
    out, qkv, kv, own_slots, prefix_slots, base,
    H: tl.constexpr, X: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stands for the kernels after attention; overwrites queries, new keys, stored keys and some of the prefix."""
    token, x, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = (token * X + x) * D + d
    fresh = tl.load(base + at)
    seen = tl.load(out + (token * H + x % H) * D + d)
    tl.store(qkv + at, fresh + seen)
    if x >= H:
        own, earlier = tl.load(own_slots + token), tl.load(prefix_slots + token)
        tl.store(kv + (own * (X - H) + x - H) * D + d, tl.full([D], float("nan"), kv.dtype.element_ty))
        tl.store(kv + (earlier * (X - H) + x - H) * D + d, fresh - seen)


@pytest.mark.parametrize("early", [False, True], ids=["all keys fresh", "early reads"])
@pytest.mark.parametrize(
    "case",
    [("tree", 1, 1000, 6), ("tree", 1, 3000, 32), ("chain", 1, 1000, 1), ("chain", 16, 700, 1), ("chain", 3, 700, 6)],
    ids=str,
)
def test_chained_launches_compute_what_unchained_ones_do(case: tuple, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a kernel that reads before its wait what its predecessor writes, or starts its successor too early.

    Sixty layers, each of which overwrites all that the one before it read, in one graph, replayed on ever new inputs.  The
    same arithmetic in the same order: equal to the last bit.
    early: attention may read other keys than the queries' own before its wait; a kernel that triggers late stands for the
        projections in front of the store.
    """
    w, (kind, B, L, N), hopper = world(*case), case, None
    if early:
        (paged,) = w.plan.segments
        paged = replace(paged, fresh="none" if kind == "tree" else "queries")
        w = w._replace(plan=replace(w.plan, segments=(paged,)))
        if torch.cuda.get_device_capability() == (9, 0):  # the kernel that reads early is made for these
            hopper = True
            takes = hopper_tiles.hopper_tiles(w.q_THD, w.view, paged, PLAIN, 132, hopper) is not None
            assert takes == (case != ("chain", 1, 1000, 1))
    T, H, D = w.q_THD.shape
    X, kv, backend = H + 16, w.view.kv, TritonBackend(hopper=hopper)
    prefix_slots = PageTable(w.table, 16).slots_at((17 * torch.arange(N, device=DEVICE)).expand(B, N)).flatten()
    table = rotary_table(10_000.0 ** -(torch.arange(D // 2) / (D // 2)), 4096).to(DEVICE, kv.dtype)
    prep = HeadPrep(Rotation(table, torch.arange(T, device=DEVICE)), 8)
    base, qkv = (torch.randn(T, X, D, device=DEVICE, dtype=kv.dtype) for _ in range(2))

    def layers() -> None:
        prepared = backend.prepare(w.plan)
        for _ in range(60):
            if early:
                launch_last_positions(w.lens_B, N)
            out = backend.attend(backend.store(w.view, qkv, w.slots_T, prep), w.view, prepared).out_THD
            overwrite_kernel[(T, X)](
                out, qkv, kv, w.slots_T, prefix_slots, base, H=H, X=X, D=D, num_warps=1, **chained(DEVICE)
            )  # fmt: skip

    def capture() -> torch.cuda.CUDAGraph:
        layers()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            layers()
        return graph

    with_pdl = capture()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "has_pdl", lambda device: False)
        without = capture()
    for replay in range(12):
        fresh = [torch.randn_like(x) for x in (base, qkv, kv)]
        if kind == "tree":  # a chain reads its own tokens, so these slots are fixed
            w.lens_B.fill_(L - 31 * replay)
        results = []
        for graph in (with_pdl, without):
            for x, value in zip((base, qkv, kv), fresh):
                x.copy_(value)
            graph.replay()
            results.append(qkv.clone())
        assert results[0].isfinite().all()
        assert torch.equal(*results), f"replay {replay}: {(results[0] != results[1]).sum()} elements differ"
