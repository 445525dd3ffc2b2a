"""The kernel that adds sinks to a state against its definition: in the interpreter, or on a GPU where there is one."""

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.attention.kernels.sinks_triton import launch_sinks
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
