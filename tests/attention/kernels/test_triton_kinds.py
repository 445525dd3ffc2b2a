"""Windows, chunks, sinks, softcaps, shared prefixes and 8-bit keys: `torch` and `triton` against the definition, in float64.

Whatever no query may read is poisoned: its slot holds NaN, and a page of which nothing is read is named by any number.

Shapes: B sequences, N tree nodes, T queries, H heads, K kv heads, D head dim, P page size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import on_device, plan_on_device, ragged_causal_segment
from toolkit.kernels import DEVICE, HAS_GPU
from toolkit.oracles.reference import ReferenceBackend
from toolkit.trees import random_masks
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.int8_keys import Int8KeysLayout, Int8KeysView
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.quant_cache import QuantView, to_fp8, to_int8
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.tables_triton import launch_first_keys, launch_last_positions
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment, first_keys, last_positions, uniform_cu_seqlens
from specdec.attention.state import AttentionState

NAN = float("nan")
N = 5  # nodes of a tree, queries of a chain
View = MHAView | QuantView | Int8KeysView
STORED = ("auto", "fp8", "int8", "int8_keys", "int8 queries", "int8_keys queries")  # the last two: with queries in int8
pytestmark = pytest.mark.usefixtures("poisoned_new_memory")  # an unwritten element that is read or returned shows


class World:
    """Sequences of `lens` committed tokens, the first `shared` of the later ones in common, and room for N more each."""

    def __init__(self, lens: list[int], heads: tuple[int, int, int], P: int, seed: int, shared: int = 0) -> None:
        (group, self.K, self.D), self.P, self.B, self.lens_list, self.seed = heads, P, len(lens), lens, seed
        self.H, self.pages = group * self.K, Scattered(lens, P, extra=N, seed=seed)
        self.table, self.lens = self.pages.table_BW, self.pages.lens_B
        self.shared_B = torch.tensor([shared if n >= shared else 0 for n in lens], dtype=torch.int32)
        self.table[self.shared_B > 0, : shared // P] = self.table[-1, : shared // P]

    def randn(self, *shape: int) -> Tensor:
        return self.pages.randn(*shape)

    def view(self, kv_cache_dtype: str, dtype: torch.dtype) -> View:
        kv_N2KD = self.randn(self.pages.num_slots, 2, self.K, self.D)
        if kv_cache_dtype == "fp8":
            scale_2K = torch.rand(2, self.K, generator=self.pages.generator) * 0.02 + 0.005
            return QuantView(to_fp8(kv_N2KD, scale_2K), scale_2K=scale_2K)
        if kv_cache_dtype in ("int8", "int8 queries"):
            stored, scales_N2K = to_int8(kv_N2KD)
            return QuantView(stored, scales_N2K=scales_N2K, int8_queries=kv_cache_dtype == "int8 queries")
        if kv_cache_dtype.startswith("int8_keys"):
            layout = Int8KeysLayout(self.K, self.D, dtype, int8_queries=kv_cache_dtype == "int8_keys queries")
            view = KVCache(layout, [FULL], len(kv_N2KD)).view(0)
            view.write(torch.arange(len(kv_N2KD)), kv_N2KD.to(dtype))
            assert isinstance(view, Int8KeysView)
            return view
        return MHAView(kv_N2KD.to(dtype))

    def scoring(self, full: bool) -> Scoring:
        return Scoring(0.4, 3.0, self.randn(self.H)) if full else PLAIN


def decode(w: World) -> AttentionPlan:
    return AttentionPlan((causal_segment(PageTable(w.table, w.P), w.lens, 1),))


def chain(w: World) -> AttentionPlan:
    """Includes sequences with fewer tokens than queries, whose first queries have no position."""
    return AttentionPlan((causal_segment(PageTable(w.table, w.P), w.lens, N),))


def prompts(w: World) -> AttentionPlan:
    """The last two thirds of each sequence, as a ragged batch; the tokens before them are in the cache."""
    counts = [n - n // 3 for n in w.lens_list]
    positions_T = torch.cat([torch.arange(n - count, n) for n, count in zip(w.lens_list, counts, strict=True)])
    return AttentionPlan((ragged_causal_segment(PageTable(w.table, w.P), counts, w.lens_list),), positions_T)


def tree_suffix(w: World) -> tuple[Segment, Tensor]:
    """Random trees, and their nodes' positions."""
    mask_BNN = random_masks(w.B, N, w.seed)
    suffix = replace(Segment.empty(w.B * N, N, 1), base_B=w.lens)
    fill_tree_suffix(suffix, w.pages.fresh_slots(), mask_BNN)
    return suffix, (w.lens[:, None] + mask_BNN.sum(-1) - 1).flatten()


def tree(w: World) -> AttentionPlan:
    suffix, positions_T = tree_suffix(w)
    return AttentionPlan((prefix_segment(PageTable(w.table, w.P), w.lens, N),), positions_T, suffix)


def split(w: World, own: Segment) -> tuple[Segment, Segment]:
    """The shared pages as one row that holds all queries, and each row's remaining pages."""
    shared = w.shared_B.max()
    members_T = w.shared_B.repeat_interleave(N)
    starts_T = torch.where(members_T > 0, 0, shared).int()  # rows that share nothing begin after the shared keys
    cu_seqlens_q = uniform_cu_seqlens(1, w.B * N, "cpu")
    once = Segment(PageTable(w.table[-1:], w.P), shared[None], cu_seqlens_q, w.B * N, starts_T=starts_T)
    return once, replace(own, starts_T=members_T)


def shared_tree(w: World) -> AttentionPlan:
    suffix, positions_T = tree_suffix(w)
    return AttentionPlan(split(w, prefix_segment(PageTable(w.table, w.P), w.lens, N)), positions_T, suffix)


def shared_chain(w: World) -> AttentionPlan:
    own = causal_segment(PageTable(w.table, w.P), w.lens, N)
    return AttentionPlan(split(w, own), last_positions(own))


def poisoned(view: View, plan: AttentionPlan, P: int) -> tuple[View, AttentionPlan]:
    """NaN in every slot that no query reads, and any page's number in every entry that no query looks up."""
    seen_N, parts = torch.zeros(view.kv.shape[0], dtype=torch.bool), []
    for s in plan.parts:
        table = torch.randint_like(s.pages.table, view.kv.shape[0] // s.pages.page_size)
        for row in range(s.rows):
            start, end = s.cu_seqlens_q[row : row + 2].tolist()
            length = int(s.cache_seqlens[row])
            for t in range(start, end):
                first = 0 if s.starts_T is None else int(s.starts_T[t])
                keys = torch.arange(first, max(first, length - (end - 1 - t) * s.causal))
                places = keys[keys >= 0] // s.pages.page_size
                table[row, places] = s.pages.table[row, places]
                seen_N[s.pages.table[row, places].long() * s.pages.page_size + keys[keys >= 0] % s.pages.page_size] = True
        parts.append(replace(s, pages=s.pages._replace(table=table)))
    *segments, suffix = parts if plan.suffix is not None else (*parts, None)
    plan = replace(plan, segments=tuple(segments), suffix=suffix)
    kv = view.kv.clone()
    if not isinstance(view, MHAView):
        kv.view(torch.uint8)[~seen_N] = 255  # NaN in every float type
    if isinstance(view, Int8KeysView):
        return replace(view, kv=kv, scales_NK=view.scales_NK.masked_fill(~seen_N[:, None], NAN)), plan
    if isinstance(view, QuantView):
        scales = None if view.scales_N2K is None else view.scales_N2K.masked_fill(~seen_N[:, None, None], NAN)
        return replace(view, kv=kv, scales_N2K=scales), plan
    kv[~seen_N] = NAN
    return MHAView(kv), plan


BACKENDS = {"torch": (TorchBackend, torch.float64), "triton": (lambda: TritonBackend(40), torch.float32)}
PLANS = [decode, chain, prompts, tree, shared_tree, shared_chain]
KINDS = [FULL, LayerKind(window=1), LayerKind(window=6), LayerKind(chunk=4), LayerKind(window=140), LayerKind(window=6, skip=2)]
HEADS = [(4, 2, 8), (3, 1, 24), (1, 3, 8), (2, 2, 16), (8, 1, 64)]  # G, K, D
CASES = [
    pytest.param(name, plan_of, kind, HEADS[(p + k) % 5], (1, 5, 16)[(p + 2 * k) % 3], STORED[(p + 2 * k) % 6],
                 k % 2 == 0, id=f"{name}-{plan_of.__name__}-{kind}".replace(" ", ""))
    for name in BACKENDS for p, plan_of in enumerate(PLANS) for k, kind in enumerate(KINDS)
    if HAS_GPU or name == "torch" or (p + k) % 2 == 0  # the interpreter is slow
]  # fmt: skip


@pytest.mark.slow_cases(keep=30)
@pytest.mark.parametrize(("name", "plan_of", "kind", "heads", "P", "kv_cache_dtype", "scored"), CASES)
def test_every_kind_equals_the_definition(
    name: str,
    plan_of: Callable[[World], AttentionPlan],
    kind: LayerKind,
    heads: tuple[int, int, int],
    P: int,
    kv_cache_dtype: str,
    scored: bool,
) -> None:
    """Keeps out: a window's or chunk's first key off by one, in a suffix too; sinks or a scale taken twice or never; pages read
    before the first key; a wrong result of a query whose window holds nothing of the prefix.
    """
    make, dtype = BACKENDS[name]
    shared = 2 * 16 if plan_of in (shared_tree, shared_chain) else 0
    w = World([0, 3, 41, 36] if plan_of is prompts else [0, 150, 36, 3], heads, P, sum(heads) + P, shared // P * P)
    plan = plan_of(w).local(kind)
    scoring, T = w.scoring(scored), int(plan.segments[0].cu_seqlens_q[-1])
    view, plan = poisoned(w.view(kv_cache_dtype, dtype), plan, P)
    q_THD = w.randn(T, w.H, w.D).to(dtype)
    want = attended(ReferenceBackend(), q_THD.double(), view, plan, scoring)
    check(make(), q_THD, view, plan, scoring, want)


def check(backend: Backend, q_THD: Tensor, view: View, plan: AttentionPlan, scoring: Scoring, want: Tensor) -> None:
    """attend, and run of each segment, whose states hold no sinks."""
    q_THD = q_THD.to(DEVICE)
    plan = plan_on_device(plan, DEVICE)
    there = scoring if scoring.sinks_H is None else replace(scoring, sinks_H=scoring.sinks_H.to(DEVICE))
    bound = 1e-9 if q_THD.dtype == torch.float64 else 3e-5
    out_THD = attended(backend, q_THD, on_device(view, DEVICE), plan, there)
    torch.testing.assert_close(out_THD.double().cpu(), want, atol=bound, rtol=bound)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int8_keys queries"])
def test_a_segments_state_holds_no_sinks(kv_cache_dtype: str, name: str) -> None:
    """Keeps out: sinks that every segment of a plan brings along; an lse without its softcap or scale, or of idle splits."""
    make, dtype = BACKENDS[name]
    w = World([0, 150, 36, 3], (4, 2, 8), 5, 7, 30)
    plan, scoring = shared_tree(w).local(LayerKind(window=140)), w.scoring(True)
    view, plan = poisoned(w.view(kv_cache_dtype, dtype), plan, w.P)
    q_THD = w.randn(w.B * N, w.H, w.D).to(dtype)
    for segment in plan.parts:
        want = ReferenceBackend().run(q_THD.double(), view, segment, scoring)
        there = replace(scoring, sinks_H=scoring.sinks_H.to(DEVICE))
        got = make().run(q_THD.to(DEVICE), on_device(view, DEVICE), on_device(segment, DEVICE), there)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double().cpu(), b, atol=3e-5, rtol=3e-5)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", STORED)
def test_half_precision(kv_cache_dtype: str) -> None:
    """Keeps out: weights times small scales that vanish in float16."""
    w = World([0, 150, 36, 3], (4, 2, 16), 16, 8)
    plan = tree(w)
    full = w.view(kv_cache_dtype, torch.float16)
    if isinstance(full, QuantView):  # values of about 1e-3
        scales = full.scale_2K if full.scales_N2K is None else full.scales_N2K.transpose(0, 1)
        scales[1] *= 1e-3
    view, plan = poisoned(full, plan, w.P)
    q_THD = w.randn(w.B * N, w.H, w.D).half()
    want = attended(ReferenceBackend(), q_THD.double(), view, plan)
    backend = TritonBackend(40)
    plan = plan_on_device(plan, DEVICE)
    out_THD = attended(backend, q_THD.to(DEVICE), on_device(view, DEVICE), plan).double().cpu()
    assert float((out_THD - want).norm() / want.norm()) < (2.5e-3 if kv_cache_dtype == "fp8" else 2e-3)  # fp8: 2.06e-3 here


class Library(TritonBackend):
    """Answers segments of pages by the definition, as a library's kernel would, and leaves the others to our kernels."""

    def partial_splits(self, q_THD: Tensor, view: View, segment: Segment, scoring: Scoring) -> int:
        return 0 if segment.starts_T is None else super().partial_splits(q_THD, view, segment, scoring)

    def paged_partial(
        self, q_THD: Tensor, view: View, segment: Segment, scoring: Scoring, out_THSD: Tensor, lse_THS: Tensor, schedules: Any
    ) -> AttentionState | None:
        if segment.starts_T is not None:
            return super().paged_partial(q_THD, view, segment, scoring, out_THSD, lse_THS, schedules)
        assert out_THSD.shape[2] == 0
        out_THD, lse_TH = ReferenceBackend().run(q_THD, view, segment, scoring)
        fused = torch.full((out_THD.shape[0], 3, *out_THD.shape[1:]), NAN, device=DEVICE)  # a slice of something larger
        fused[:, 1] = out_THD
        return AttentionState(fused[:, 1], lse_TH.t().contiguous().t())


@pytest.mark.slow_cases
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("plan_of", [decode, chain, tree, shared_tree, "two"])
def test_a_library_may_answer_segments(plan_of: Callable[[World], AttentionPlan] | str, scored: bool) -> None:
    """Keeps out: states lost or merged twice, sinks forgotten or passed on, the library's layout ignored, its junk read."""
    w = World([0, 150, 36, 3], (4, 2, 8), 4, 9, 32)
    plan = replace(tree(w), segments=tree(w).segments + chain(w).segments) if isinstance(plan_of, str) else plan_of(w)
    scoring, T = w.scoring(scored), int(plan.segments[0].cu_seqlens_q[-1])
    view, q_THD = w.view("auto", torch.float32), w.randn(T, w.H, w.D)
    want = attended(ReferenceBackend(), q_THD.double(), view, plan, scoring)
    check(Library(40), q_THD, view, plan, scoring, want)


@pytest.mark.parametrize("per_base", [0, 1, 7])
@pytest.mark.parametrize(
    "kind", [LayerKind(window=1), LayerKind(window=9), LayerKind(chunk=16), LayerKind(skip=3), LayerKind(7, skip=3)], ids=str
)
def test_first_keys(kind: LayerKind, per_base: int) -> None:
    """Keeps out: a base of another sequence, a lower bound overruled, a block's tail unwritten."""
    generator = torch.Generator().manual_seed(1)
    positions_T = torch.randint(200, (210,), generator=generator)
    base_B = torch.randint(100, (210 // per_base,), generator=generator).int() if per_base else None
    for lower_T in (None, torch.randint(200, (210,), generator=generator).int()):
        want = first_keys(kind, positions_T, base_B, lower_T)
        args = [None if x is None else x.to(DEVICE) for x in (positions_T, base_B, lower_T)]
        got = launch_first_keys(kind, *args)
        assert got.dtype == want.dtype == torch.int32 and torch.equal(got.cpu(), want)


@pytest.mark.parametrize("n", [1, 6])
def test_last_positions(n: int) -> None:
    lens_R = torch.randint(300, (40,), generator=torch.Generator().manual_seed(2)).int()
    segment = causal_segment(PageTable(torch.zeros(40, 1, dtype=torch.int32)), lens_R, n)
    got, want = launch_last_positions(lens_R.to(DEVICE), n), last_positions(segment)
    assert got.dtype == want.dtype and torch.equal(got.cpu(), want)
