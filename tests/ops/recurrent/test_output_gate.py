"""The gate of an output without a norm: the kernel against its definition.  Under the interpreter where there is no GPU."""

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.ops.recurrent.gates.output_gate import gated_output
from specdec.ops.recurrent.gates.output_gate_triton import launch_gated_output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [None, [4, 0, 2]])
@pytest.mark.parametrize("silu", [False, True])
def test_the_kernel_equals_the_definition(silu: bool, dtype: torch.dtype, rows: list[int] | None) -> None:
    """Keeps out: another token's gate, a block of columns left out, a sigmoid that is rounded later, or taken for SiLU."""
    heads, dim, tokens = 5, 272, 6  # 1,360 columns: more than a block
    fused = torch.randn(tokens, 2 * heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)  # gates beside others
    rows_R = None if rows is None else torch.tensor(rows)
    out = torch.randn(len(rows or range(tokens)), heads, dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    want = gated_output(out, fused[:, heads:], rows_R, silu)
    on_device = None if rows_R is None else rows_R.to(DEVICE)
    got = launch_gated_output(out.to(DEVICE), fused.to(DEVICE)[:, heads:], on_device, silu)
    torch.testing.assert_close(got.cpu(), want, atol=0, rtol=2e-6 if dtype == torch.float32 else 2e-3)
