"""Keys and values of different width, with strides of their own, and pairs of heads read as one of twice the width.

Every backend that reads them is compared with the definition in float64, over caches that hold NaN wherever nobody may read.
Without a GPU the Triton kernels run in the interpreter.

Shapes: B sequences, N queries of each, T = B * N, H heads, K kv heads, D key dim, E value dim.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment
from toolkit.kernels import DEVICE
from toolkit.oracles.reference import ReferenceBackend
from toolkit.trees import mask_of
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.quant_cache import KV_CACHE_DTYPES, QuantView
from specdec.attention.caches.split_cache import PairedView, SplitView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment

View = SplitView | PairedView
BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3}
PARENTS = [0, 0, 1, 1, 3]  # of a tree's nodes
LENS = [41, 0, 9]


class Sizes(NamedTuple):
    """G: query heads of a key head.  paired: of an ordinary cache, whose values go in pairs, E = 2D."""

    K: int
    G: int
    D: int
    E: int
    paired: bool = False


SIZES = [Sizes(2, 3, 24, 16), Sizes(4, 1, 16, 40), Sizes(4, 2, 16, 32, paired=True), Sizes(1, 5, 48, 8)]
KINDS = [FULL, LayerKind(window=7)]


def view_of(pages: Scattered, sizes: Sizes, dtype: torch.dtype) -> View:
    """Keys and values in one row a token, with unused numbers between them: nothing has the strides of another tensor."""
    K, _, D, E, paired = sizes
    if paired:
        return PairedView(pages.fill(2, K, D, dtype=dtype))
    row = pages.fill(K * D + 3 + K * E + 5, dtype=dtype)
    return SplitView(row[:, : K * D].unflatten(1, (K, D)), row[:, K * D + 3 :][:, : K * E].unflatten(1, (K, E)))


def exact(view: View) -> View:
    """The same numbers in float64."""
    return PairedView(view.kv.double()) if isinstance(view, PairedView) else SplitView(view.k.double(), view.v.double())


def plan_of(shape: str, pages: Scattered, N: int) -> AttentionPlan:
    table = PageTable(pages.table_BW, pages.page_size)
    if shape == "prompts":
        lens = [n + N for n in LENS]
        return AttentionPlan((ragged_causal_segment(table, [n + N if n else N for n in LENS], lens),))
    if shape == "chain":
        return AttentionPlan((causal_segment(table, pages.lens_B + N, N),))
    mask_NN = mask_of(PARENTS).to(DEVICE)
    suffix = replace(Segment.empty(len(LENS) * N, int(mask_NN.sum(1).max()), 1, device=DEVICE), base_B=pages.lens_B)
    fill_tree_suffix(suffix, pages.fresh_slots(), mask_NN.expand(len(LENS), N, N))
    positions_T = (pages.lens_B.long()[:, None] + mask_NN.sum(1) - 1).flatten()
    return AttentionPlan((prefix_segment(table, pages.lens_B, N),), positions_T, suffix)


def attend(backend: Backend, q_THD: Tensor, view: View, plan: AttentionPlan, scoring: Scoring) -> Tensor:
    state = backend.attend(q_THD, view, backend.prepare(plan), scoring)
    return state if isinstance(state, Tensor) else state.out_THD


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("sizes", "shape", "page_size"),
    [
        (SIZES[0], "tree", 1), (SIZES[1], "tree", 4), (SIZES[2], "tree", 64), (SIZES[3], "tree", 16), (SIZES[2], "chain", 16),
        (SIZES[0], "prompts", 4), (SIZES[2], "prompts", 1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(TorchBackend(), torch.float16), (TritonBackend(6), torch.float32), (TritonBackend(200), torch.float16)],
    ids=["torch", "triton", "splits"],
)
def test_against_the_definition(backend: Backend, shape: str, page_size: int, sizes: Sizes, dtype: torch.dtype) -> None:
    """Keeps out: a value read with a key's stride, width or head; a padded column that is summed; NaN of an unread slot."""
    N = len(PARENTS)
    pages = Scattered(LENS, page_size, extra=N, seed=page_size, device=DEVICE)
    view, plan = view_of(pages, sizes, dtype), plan_of(shape, pages, N)
    T = int(plan.segments[0].cu_seqlens_q[-1])
    q_THD = pages.randn(T, sizes.K * sizes.G, sizes.D, dtype=dtype)
    kinds = [FULL] if shape == "prompts" else KINDS
    for kind, scoring in [(kind, PLAIN) for kind in kinds] + [(FULL, Scoring(0.3, 5.0))]:
        local = plan.local(kind)
        out_THE = attend(backend, q_THD, view, local, scoring)
        want_THE = attend(ReferenceBackend(), q_THD.double(), exact(view), local, scoring)
        assert out_THE.shape == (T, sizes.K * sizes.G, sizes.E) and out_THE.dtype == dtype
        torch.testing.assert_close(out_THE.double(), want_THE, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


def pairs_in_8_bits(pages: Scattered, quant: str, int8_queries: bool) -> PairedView:
    """Pairs of which each head has scales of its own, very unlike its neighbour's.  What nobody may read is NaN, or has NaN for
    its scale."""
    K, _, D, _, _ = SIZES[2]
    size = 4.0 ** torch.arange(2 * K, dtype=torch.float32, device=DEVICE).view(2, K, 1) / 16
    slots_N = torch.cat([pages.slots(row, 0, n + pages.extra) for row, n in enumerate(pages.lens)])
    heads = pages.randn(len(slots_N), 2, K, D) * size
    kv = torch.full((pages.num_slots, 2, K, D), -1, dtype=torch.int8, device=DEVICE).view(KV_CACHE_DTYPES[quant])
    if quant == "fp8":
        view = QuantView(kv, scale_2K=torch.empty(2, K, device=DEVICE), needs_scale=True)
    else:
        scales = torch.full((pages.num_slots, 2, K), torch.nan, device=DEVICE)
        view = QuantView(kv, scales_N2K=scales, int8_queries=int8_queries)
    view.write(slots_N, heads)
    return PairedView.of(view)


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize(
    ("quant", "shape", "page_size", "dtype", "programs"),
    [
        ("fp8", "tree", 4, torch.float32, 6), ("int8", "tree", 16, torch.float32, 6),
        ("int8 queries", "tree", 1, torch.float16, 200), ("fp8", "chain", 16, torch.float16, 200),
        ("int8", "chain", 1, torch.float16, 6), ("int8", "prompts", 4, torch.float16, 200),
        ("fp8", "prompts", 64, torch.float16, 6), ("int8 queries", "prompts", 16, torch.float32, 6),
        # Triton's interpreter computes 8-bit suffixes wrongly in bfloat16, of ordinary heads too.
        *(pytest.param(quant, shape, 16, torch.bfloat16, 200, marks=pytest.mark.gpu)
          for quant in ("fp8", "int8", "int8 queries") for shape in ("tree", "prompts")),
    ],
    ids=str,
)  # fmt: skip
def test_pairs_in_8_bits(quant: str, shape: str, page_size: int, dtype: torch.dtype, programs: int) -> None:
    """Keeps out: a half of a key or value with the scale of the other half.  The definition reads what the cache gives back."""
    N, (K, G, D, E, _) = len(PARENTS), SIZES[2]
    pages = Scattered(LENS, page_size, extra=N, seed=page_size, device=DEVICE)
    view, plan = pairs_in_8_bits(pages, quant.split()[0], "queries" in quant), plan_of(shape, pages, N)
    q_THD = pages.randn(int(plan.segments[0].cu_seqlens_q[-1]), K * G, D, dtype=dtype) / 4
    bound = BOUNDS.get(dtype, 3e-2)
    for kind, scoring in ((FULL, Scoring(0.3, 5.0)),) if shape == "prompts" else ((FULL, PLAIN), (KINDS[1], Scoring(0.3, 5.0))):
        local = plan.local(kind)
        want_THE = attend(ReferenceBackend(), q_THD.double(), view, local, scoring)
        for backend in (TritonBackend(programs), TorchBackend()):
            out_THE = attend(backend, q_THD, view, local, scoring)
            assert out_THE.shape == (len(q_THD), K * G, E) and out_THE.dtype == dtype
            size_E = want_THE.abs().amax((0, 1))  # columns differ in size as heads do
            torch.testing.assert_close(out_THE.double() / size_E, want_THE / size_E, atol=bound, rtol=bound)


def test_a_pair_reads_both_values_with_each_key() -> None:
    """Keeps out: a query that is multiplied with the other half of its pair's key.  By four calls of half the width."""
    sizes, pages = SIZES[2], Scattered(LENS, 4, extra=len(PARENTS), device=DEVICE)
    plan, (K, G, D, _, _) = plan_of("tree", pages, len(PARENTS)), sizes
    kv = pages.fill(2, K, D)
    q_THD = pages.randn(len(LENS) * len(PARENTS), K * G, D)
    out_THE = attend(TritonBackend(6), q_THD, PairedView(kv), plan, PLAIN).unflatten(1, (K // 2, 2, G))
    for c in range(2):
        q = q_THD.unflatten(1, (K // 2, 2, G))[:, :, c].flatten(1, 2)
        for half in range(2):
            view = SplitView(kv[:, 0, c::2], kv[:, 1, half::2])
            want_THD = attend(TritonBackend(6), q, view, plan, PLAIN)
            torch.testing.assert_close(out_THE[:, :, c, :, half * D : (half + 1) * D].flatten(1, 2), want_THD)


def test_stored_heads_are_read_back() -> None:
    """Keeps out: a store that writes past a head's width, or into another token's slot."""
    row = torch.full((12, 50), torch.nan)
    view = SplitView(row[:, :24].unflatten(1, (2, 12)), row[:, 30:46].unflatten(1, (2, 8)))
    slots_T, k_TKD, v_TVE = torch.tensor([7, 2, 9]), torch.randn(3, 2, 12), torch.randn(3, 2, 8)
    view.write_heads(slots_T, k_TKD, v_TVE)
    k, v = view.read(slots_T, torch.float64)
    assert torch.equal(k, k_TKD.double()) and torch.equal(v, v_TVE.double())
    assert int(row.isfinite().sum()) == 3 * (24 + 16)
