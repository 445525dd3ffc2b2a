"""Keys and values of different width, with strides of their own, and key heads that share a value head.

Every backend that reads them is compared with the definition in float64, over caches that hold NaN wherever nobody may read.
Without a GPU the Triton kernels run in the interpreter.

Shapes: B sequences, N queries of each, T = B * N, H heads, K key heads, V value heads, D key dim, E value dim.
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
from specdec.attention.caches.split_cache import SplitView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment

BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3}
PARENTS = [0, 0, 1, 1, 3]  # of a tree's nodes
LENS = [41, 0, 9]


class Sizes(NamedTuple):
    """G: query heads of a key head.  share: key heads of a value head."""

    K: int
    G: int
    D: int
    E: int
    share: int = 1

    @property
    def V(self) -> int:
        return self.K // self.share


SIZES = [Sizes(2, 3, 24, 16), Sizes(4, 1, 16, 40), Sizes(4, 2, 16, 32, share=2), Sizes(1, 5, 48, 8)]
KINDS = [FULL, LayerKind(window=7)]


def split_view(pages: Scattered, sizes: Sizes, dtype: torch.dtype) -> SplitView:
    """Keys and values in one row a token, with unused numbers between them: nothing has the strides of another tensor."""
    K, _, D, E, share = sizes
    row = pages.fill(K * D + 3 + (K // share) * E + 5, dtype=dtype)
    v = row[:, K * D + 3 :][:, : (K // share) * E]
    return SplitView(row[:, : K * D].unflatten(1, (K, D)), v.unflatten(1, (K // share, E)))


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


def attend(backend: Backend, q_THD: Tensor, view: SplitView, plan: AttentionPlan, scoring: Scoring) -> Tensor:
    state = backend.attend(q_THD, view, backend.prepare(plan), scoring)
    return state if isinstance(state, Tensor) else state.out_THD


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("sizes", "shape", "page_size"),
    [
        (SIZES[0], "tree", 1), (SIZES[1], "tree", 4), (SIZES[2], "tree", 64), (SIZES[3], "tree", 16), (SIZES[2], "chain", 16),
        (SIZES[0], "prompts", 4), (SIZES[2], "prompts", 1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("backend", [TorchBackend(), TritonBackend(6), TritonBackend(200)], ids=["torch", "triton", "splits"])
def test_against_the_definition(backend: Backend, shape: str, page_size: int, sizes: Sizes, dtype: torch.dtype) -> None:
    """Keeps out: a value read with a key's stride, width or head; a padded column that is summed; NaN of an unread slot."""
    N = len(PARENTS)
    pages = Scattered(LENS, page_size, extra=N, seed=page_size, device=DEVICE)
    view, plan = split_view(pages, sizes, dtype), plan_of(shape, pages, N)
    T = int(plan.segments[0].cu_seqlens_q[-1])
    q_THD = pages.randn(T, sizes.K * sizes.G, sizes.D, dtype=dtype)
    exact = SplitView(view.k.double(), view.v.double())
    kinds = [FULL] if shape == "prompts" else KINDS
    for kind, scoring in [(kind, PLAIN) for kind in kinds] + [(FULL, Scoring(0.3, 5.0))]:
        local = plan.local(kind)
        out_THE = attend(backend, q_THD, view, local, scoring)
        want_THE = attend(ReferenceBackend(), q_THD.double(), exact, local, scoring)
        assert out_THE.shape == (T, sizes.K * sizes.G, sizes.E) and out_THE.dtype == dtype
        torch.testing.assert_close(out_THE.double(), want_THE, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


def test_a_shared_value_head_is_read_as_its_copies_would_be() -> None:
    """Keeps out: neighbouring key heads that read different value heads.  Bit for bit, in the Triton kernels."""
    sizes, pages = SIZES[2], Scattered(LENS, 4, extra=len(PARENTS), device=DEVICE)
    view, plan = split_view(pages, sizes, torch.float32), plan_of("tree", pages, len(PARENTS))
    q_THD = pages.randn(len(LENS) * len(PARENTS), sizes.K * sizes.G, sizes.D)
    copied = SplitView(view.k, view.v.repeat_interleave(sizes.share, dim=1))
    outs = [attend(TritonBackend(6), q_THD, each, plan, PLAIN) for each in (view, copied)]
    assert torch.equal(*outs)


def test_stored_heads_are_read_back() -> None:
    """Keeps out: a store that writes past a head's width, or into another token's slot."""
    row = torch.full((12, 50), torch.nan)
    view = SplitView(row[:, :24].unflatten(1, (2, 12)), row[:, 30:46].unflatten(1, (2, 8)))
    slots_T, k_TKD, v_TVE = torch.tensor([7, 2, 9]), torch.randn(3, 2, 12), torch.randn(3, 2, 8)
    view.write_heads(slots_T, k_TKD, v_TVE)
    k, v = view.read(slots_T, torch.float64)
    assert torch.equal(k, k_TKD.double()) and torch.equal(v, v_TVE.double())
    assert int(row.isfinite().sum()) == 3 * (24 + 16)
