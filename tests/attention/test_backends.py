"""Every backend against the definition (ReferenceBackend, float64): one matrix of plans, heads, page sizes and lengths.

Triton runs under its interpreter where there is no GPU (float32 and float16: it computes bfloat16 products wrongly).
Also the algebra the backends rest on: merging states.

Shapes: B sequences, N tree nodes, K topk, S draft steps, T queries, H heads, D head dim.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import narrowed, ragged_causal_segment
from toolkit.oracles.reference import ReferenceBackend
from toolkit.trees import random_masks
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.operators.backend import OperatorBackend
from specdec.attention.pages import PageTable
from specdec.attention.plan import (
    causal_segment,
    fill_draft_suffix,
    fill_tree_suffix,
    prefix_segment,
)
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, merge_states
from specdec.ops.rope import HeadPrep, Rotation, rotary_table

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="bfloat16 needs a GPU")


class Setup(NamedTuple):
    """Which backend computes in which type, and where."""

    name: str
    dtype: torch.dtype
    device: str

    def backend(self) -> Backend:
        if self.name == "torch":
            return TorchBackend()
        if self.name == "operators":
            return OperatorBackend()
        from specdec.attention.kernels.triton_backend import TritonBackend

        return TritonBackend(programs=128)  # enough for the longest rows to be split


SETUPS = [
    pytest.param(Setup("torch", torch.float64, "cpu"), id="torch-float64"),
    pytest.param(Setup("triton", torch.float32, DEVICE), id="triton-float32", marks=needs_triton),
    pytest.param(Setup("triton", torch.float16, DEVICE), id="triton-float16", marks=needs_triton),
    pytest.param(
        Setup("triton", torch.bfloat16, "cuda"), id="triton-bfloat16", marks=[needs_triton, needs_gpu, pytest.mark.gpu]
    ),
    pytest.param(Setup("operators", torch.float32, DEVICE), id="operators-float32"),
    pytest.param(Setup("operators", torch.bfloat16, "cuda"), id="operators-bfloat16", marks=[needs_gpu, pytest.mark.gpu]),
]


class World:
    """Sequences whose pages lie scattered over one cache, with room for `fresh` more tokens each."""

    def __init__(self, lens: list[int], fresh: int, shape: tuple[int, int, int, int], setup: Setup, seed: int) -> None:
        group, self.kv_heads, self.D, self.page_size = shape
        self.H, self.B, self.fresh = group * self.kv_heads, len(lens), fresh
        self.setup, self.lens_list, self.seed = setup, lens, seed
        self.pages = Scattered(lens, self.page_size, extra=fresh, seed=seed, device=setup.device)
        self.table, self.lens = self.pages.table_BW, self.pages.lens_B
        self.view = MHAView(self.randn(self.pages.num_slots, 2, self.kv_heads, self.D))

    def randn(self, *shape: int) -> Tensor:
        return self.pages.randn(*shape, dtype=self.setup.dtype)

    def q(self, queries: int) -> Tensor:
        return self.randn(queries, self.H, self.D)

    def fresh_slots(self) -> Tensor:
        return self.pages.fresh_slots()


def decode(w: World) -> tuple[AttentionPlan, int]:
    return AttentionPlan((causal_segment(PageTable(w.table, w.page_size), w.lens, 1),)), w.B


def chain(w: World) -> tuple[AttentionPlan, int]:
    """Six queries a sequence, also of sequences shorter than that: their first queries see nothing."""
    return AttentionPlan((causal_segment(PageTable(w.table, w.page_size), w.lens, 6),)), 6 * w.B


def prompts(w: World) -> tuple[AttentionPlan, int]:
    return AttentionPlan((ragged_causal_segment(PageTable(w.table, w.page_size), w.lens_list, w.lens_list),)), sum(w.lens_list)


def tree(w: World) -> tuple[AttentionPlan, int]:
    N = w.fresh
    suffix = Segment.empty(w.B * N, N, 1, device=w.setup.device)
    fill_tree_suffix(suffix, w.fresh_slots(), random_masks(w.B, N, w.seed).to(w.setup.device))
    return AttentionPlan((prefix_segment(PageTable(w.table, w.page_size), w.lens, N),), suffix=suffix), w.B * N


def draft(w: World) -> tuple[AttentionPlan, int]:
    K, step = 3, 1
    slots_BKS = w.fresh_slots()[:, : K * 2].view(w.B, K, 2).int()
    suffix = Segment.empty(w.B * K, step + 1, 1, device=w.setup.device)
    fill_draft_suffix(suffix, slots_BKS, step)
    return AttentionPlan((prefix_segment(PageTable(w.table, w.page_size), w.lens, K),), suffix=suffix), w.B * K


PLANS = [decode, chain, prompts, tree, draft]
SHAPES = [(1, 2, 8, 1), (3, 1, 24, 4), (4, 2, 16, 16), (8, 1, 64, 4), (4, 1, 80, 64), (2, 1, 128, 16)]
CASES = [
    pytest.param(*setup.values, plan_of, shape, marks=setup.marks,
                 id="{}-{}-group{}-kv{}-dim{}-page{}".format(setup.id, plan_of.__name__, *shape))
    for setup in SETUPS
    for p, plan_of in enumerate(PLANS)
    for s, shape in enumerate(SHAPES)
    # The interpreter is slow: each plan takes every other shape there, and float16 every third of those.
    if HAS_GPU or setup.values[0].name == "torch" or (p + s) % (2 if setup.id == "triton-float32" else 6) == 0
]  # fmt: skip


def expected(q_THD: Tensor, view: MHAView, plan: AttentionPlan) -> Tensor:
    """In float64 on the CPU, from the very numbers the backend was given."""
    suffix = None if plan.suffix is None else host_copy(plan.suffix)
    on_host = AttentionPlan(tuple(host_copy(segment) for segment in plan.segments), suffix=suffix)
    return attended(ReferenceBackend(), q_THD.double().cpu(), MHAView(view.kv.double().cpu()), on_host)


def host_copy(s: Segment) -> Segment:
    return Segment(s.pages.to("cpu"), s.cache_seqlens.cpu(), s.cu_seqlens_q.cpu(), s.max_seqlen_q, s.causal)


def assert_close(out: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double().cpu(), want.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.slow_cases(keep=30)
@pytest.mark.parametrize(("setup", "plan_of", "shape"), CASES)
def test_backend_equals_the_definition(
    setup: Setup, plan_of: Callable[[World], tuple[AttentionPlan, int]], shape: tuple[int, int, int, int]
) -> None:
    """Keeps out: a page's edge misread, a group's heads mixed up, a wrong causal corner, NaN from rows with nothing."""
    P = shape[-1]
    lens = [0, 1, max(P - 1, 2), P, P + 1, 160]  # 160 is split in two or more
    if plan_of is prompts:
        lens = [0, 1, 11, 20] if P < 20 else [0, P + 1]
    w = World(lens, 6 if plan_of is draft else 4, shape, setup, seed=sum(shape))
    plan, T = plan_of(w)
    backend, q_THD = setup.backend(), w.q(T)
    out_THD = attended(backend, q_THD, w.view, plan)
    assert out_THD.dtype == setup.dtype and out_THD.shape == q_THD.shape
    assert_close(out_THD, expected(q_THD, w.view, plan))


@pytest.mark.slow_cases
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("plan_of", [decode, chain, draft], ids=lambda f: f.__name__)
def test_run_gives_a_natural_log_state(plan_of: Callable[[World], tuple[AttentionPlan, int]], setup: Setup) -> None:
    """Keeps out: a base-2 lse, one of another shape, and +inf or NaN for rows that read nothing."""
    w = World([0, 3, 200, 17], 6, (4, 2, 16, 4), setup, seed=1)
    plan, T = plan_of(w)
    backend, q_THD = setup.backend(), w.q(T)
    for segment in plan.parts:
        state = backend.run(q_THD, w.view, segment)
        on_host = MHAView(w.view.kv.double().cpu())
        want = ReferenceBackend().run(q_THD.double().cpu(), on_host, host_copy(segment))
        assert_close(state.out_THD, want.out_THD)
        assert state.lse_TH.shape == want.lse_TH.shape
        tolerance = max(1e-12, TOLERANCE[setup.dtype] / 10)
        torch.testing.assert_close(state.lse_TH.double().cpu(), want.lse_TH, atol=tolerance, rtol=tolerance)


@pytest.mark.slow_cases
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("setup", SETUPS)
def test_store_rotates_and_writes_its_slots_and_no_others(setup: Setup, normed: bool) -> None:
    """Keeps out: keys and values swapped, heads swapped, values rotated, a neighbour overwritten, a half read too late."""
    Q, K, D, T = 5, 3, 24, 70  # tokens for both of the kernel's grids come from two calls
    generator = torch.Generator().manual_seed(2)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(setup.device, setup.dtype)

    table = rotary_table(10000.0 ** -(torch.arange(0, D, 2) / D), 50).to(setup.device, setup.dtype)
    norm = rand(Q + K, D) if normed else None
    slots_T = torch.randperm(200, generator=generator)[:T].to(setup.device)
    positions_T = torch.randint(50, (T,), generator=generator).to(setup.device)
    qkv_TXD = rand(T, Q + 2 * K, D)
    view = MHAView(torch.full((200, 2, K, D), -7.0, dtype=setup.dtype, device=setup.device))
    want = view.kv.double().clone()
    exact = HeadPrep(Rotation(table.double(), positions_T), K, None if norm is None else norm.double(), 1e-5)
    want_q, want[slots_T] = exact.apply_(qkv_TXD.double().clone())
    got_q = []
    for rows in (slice(0, 3), slice(3, T)):
        prep = HeadPrep(Rotation(table, positions_T[rows]), K, norm, 1e-5)
        got_q.append(setup.backend().store(view, qkv_TXD[rows].clone(), slots_T[rows], prep))
    assert_close(torch.cat(got_q), want_q.cpu())
    assert_close(view.kv, want.cpu())
    untouched = torch.ones(200, dtype=torch.bool).index_fill(0, slots_T.cpu(), False)
    assert (view.kv.cpu()[untouched] == -7).all()


@pytest.mark.slow_cases
@pytest.mark.parametrize("setup", SETUPS)
def test_static_buffers_equal_fresh_ones(setup: Setup) -> None:
    """Keeps out: a reader that looks past a row's length, or takes a buffer's size for the batch's."""
    big = Segment.empty(8 * 6, 9, 1, device=setup.device)
    big.pages.table.fill_(1)
    big.cache_seqlens.fill_(9)
    for lens in ([9, 12], [40]):
        w = World(lens, 4, (2, 1, 16, 4), setup, seed=len(lens))
        plan, T = tree(w)
        prefix, fresh = plan.parts
        static = narrowed(big, fresh.rows, 4)
        static.pages.table.copy_(fresh.pages.table)
        static.cache_seqlens.copy_(fresh.cache_seqlens)
        backend, q_THD = setup.backend(), w.q(T)
        outs = [attended(backend, q_THD, w.view, replace(plan, suffix=suffix)) for suffix in (fresh, static)]
        assert_close(outs[1], outs[0].cpu())


def random_state(T: int, H: int, D: int, seed: int) -> AttentionState:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(T, H, D, generator=generator, dtype=torch.float64)
    return AttentionState(out, 5 * torch.randn(T, H, generator=generator, dtype=torch.float64))


def empty_state(T: int, H: int, D: int) -> AttentionState:
    return AttentionState(torch.zeros(T, H, D).double(), torch.full((T, H), -torch.inf).double())


def test_merge_is_a_softmax_over_both_sets() -> None:
    """Keeps out: weights by the wrong lse."""
    w = World([40], 0, (2, 1, 16, 1), Setup("torch", torch.float64, "cpu"), seed=3)
    q_THD, reference = w.q(1), ReferenceBackend()
    halves = [
        Segment(PageTable(w.table[:, part]), torch.tensor([n], dtype=torch.int32), torch.tensor([0, 1]), 1)
        for part, n in ((slice(0, 15), 15), (slice(15, 40), 25))
    ]
    merged = merge_states(*(reference.run(q_THD, w.view, half) for half in halves))
    whole = reference.run(q_THD, w.view, prefix_segment(PageTable(w.table), w.lens, 1))
    torch.testing.assert_close(merged.out_THD, whole.out_THD)
    torch.testing.assert_close(merged.lse_TH, whole.lse_TH)


def test_merge_with_nothing_changes_nothing() -> None:
    """Keeps out: NaN from -inf minus -inf (an empty prefix, a padded row)."""
    some, none = random_state(4, 3, 8, seed=4), empty_state(4, 3, 8)
    for merged in (merge_states(some, none), merge_states(none, some)):
        torch.testing.assert_close(merged.out_THD, some.out_THD)
        torch.testing.assert_close(merged.lse_TH, some.lse_TH)
    nothing = merge_states(none, none)
    assert torch.equal(nothing.out_THD, none.out_THD) and torch.equal(nothing.lse_TH, none.lse_TH)


def test_merge_survives_far_apart_lse() -> None:
    """Keeps out: exp of a large lse."""
    a, b = random_state(2, 2, 8, seed=5), random_state(2, 2, 8, seed=6)
    high = merge_states(AttentionState(a.out_THD, a.lse_TH + 3000), b)
    torch.testing.assert_close(high.out_THD, a.out_THD)
    assert high.lse_TH.isfinite().all()


def test_merge_of_base_two_lse_would_show() -> None:
    """The test above would be blind if the base made no difference."""
    a, b = random_state(4, 3, 8, seed=7), random_state(4, 3, 8, seed=8)
    wrong = merge_states(AttentionState(a.out_THD, a.lse_TH / math.log(2)), b)
    assert (wrong.out_THD - merge_states(a, b).out_THD).abs().max() > 1e-2


def test_torch_backend_keeps_foreign_nans_out() -> None:
    """Keeps out: a key that is masked but multiplied: NaN left in a reused or dummy page by another request would spread."""
    torch.manual_seed(0)
    kv = torch.full((64, 2, 2, 8), torch.nan)
    kv[:12] = torch.randn(12, 2, 2, 8)
    table = torch.arange(16, dtype=torch.int32).view(1, 16).expand(3, 16).contiguous()
    lens = torch.tensor([9, 3, 0], dtype=torch.int32)
    q = torch.randn(3 * 2, 4, 8)
    for segment in (prefix_segment(PageTable(table, 4), lens, 2), causal_segment(PageTable(table, 4), lens, 2)):
        state, want = TorchBackend().run(q, MHAView(kv), segment), ReferenceBackend().run(q, MHAView(kv), segment)
        torch.testing.assert_close(state.out_THD, want.out_THD)
        torch.testing.assert_close(state.lse_TH, want.lse_TH)
