"""The kernels that add sinks to a state against its definition: in the interpreter, or on a GPU where there is one."""

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.oracles.reference import ReferenceBackend

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kernels.sinks_triton import launch_sinks
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kernels.triton_plan import TritonPlan
from specdec.attention.kinds import Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, with_sinks

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("T", "H", "D"), [(1, 1, 8), (7, 3, 24), (5, 8, 64)])
def test_sinks_equal_their_definition(T: int, H: int, D: int, dtype: torch.dtype) -> None:
    """Keeps out: an empty query that becomes NaN, another head's sink, an lse in base 2, a neighbour's memory written."""
    generator = torch.Generator().manual_seed(T * H)
    around = torch.randn(T + 2, H, D + 8, generator=generator).to(dtype)
    out_THD = around[1:-1, :, :D]  # with strides, as a slice of something larger
    lse_TH = torch.randn(H, T, generator=generator).t() * 30  # as flash-attn leaves it
    lse_TH[0] = -torch.inf
    out_THD[0] = 0
    sinks_H = torch.randn(H, generator=generator) * 5
    sinks_H[-1] = -torch.inf
    want = with_sinks(AttentionState(out_THD.double(), lse_TH.double()), sinks_H.double())
    on_device = around.to(DEVICE)
    got = launch_sinks(AttentionState(on_device[1:-1, :, :D], lse_TH.t().to(DEVICE).t()), sinks_H.to(DEVICE))
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(got.out_THD.double().cpu(), want.out_THD, atol=bound, rtol=bound)
    torch.testing.assert_close(got.lse_TH.double().cpu(), want.lse_TH, atol=1e-5, rtol=1e-5)
    left = on_device.cpu()
    assert torch.equal(left[[0, -1]], around[[0, -1]]) and torch.equal(left[1:-1, :, D:], around[1:-1, :, D:])


@pytest.mark.usefixtures("poisoned_new_memory")
@pytest.mark.parametrize("programs", [1, 64])  # without splits, and with
@pytest.mark.parametrize("part", ["prefix", "tree", "suffix"])
def test_a_merge_adds_sinks_once(part: str, programs: int) -> None:
    """Keeps out: sinks that a merge adds and the backend once more, or that neither adds; a sink of -inf that makes NaN."""
    torch.manual_seed(programs)
    (K, G, D), B = (2, 3, 24), 2
    view, q_THD = MHAView(torch.randn(400, 2, K, D).to(DEVICE)), torch.randn(B, K * G, D).to(DEVICE)
    sinks_H = (torch.randn(K * G) * 3).to(DEVICE)
    sinks_H[2] = -torch.inf
    table_BW = torch.randperm(400)[: B * 150].view(B, 150).int().to(DEVICE)
    lens_B, few_B = (torch.tensor([n, 0], dtype=torch.int32, device=DEVICE) for n in (140, 3))
    prefix, suffix = prefix_segment(PageTable(table_BW[:, :140]), lens_B, 1), Segment.of_slots(table_BW[:, 140:], few_B)
    plan, scoring = AttentionPlan((prefix,), suffix=None if part == "prefix" else suffix), Scoring(sinks_H=sinks_H)
    want = ReferenceBackend().attend_with_sinks(q_THD.double(), MHAView(view.kv.double()), plan, scoring)
    backend = TritonBackend(programs)
    before = backend.run(q_THD, view, prefix) if part == "suffix" else None
    prepared = backend.prepare(plan) if before is None else TritonPlan((), suffix)
    got = backend.attend_with_sinks(q_THD, view, prepared, scoring, before)
    for mine, defined in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), defined, atol=2e-5, rtol=2e-5)
