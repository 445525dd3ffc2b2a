"""The interpreter that tests of kernels run in, where there is no GPU."""

import pytest
import torch
import triton
import triton.language as tl
from toolkit.kernels import DEVICE, HAS_GPU


@triton.jit
def _wrapped_sum(a, b):
    return tl.load(a) + tl.load(b)


@triton.jit
def _sums(a, b, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, tl.max(_wrapped_sum(a + n, b + n), 0) + tl.zeros([N], tl.int32))


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled for the GPU")
def test_launches_leave_the_language_as_it_was() -> None:
    """Keeps out: kernels that can't be compiled, or run otherwise, after another one ran in the same process; a function
    that a kernel calls and that is not interpreted; sums that do not wrap."""
    before = tl.load, tl.sum, tl.tensor.__add__, tl.math.exp
    a, b = (torch.tensor(row, dtype=torch.int32, device=DEVICE) for row in ([2**31 - 1, 2], [1, 3]))
    for _ in range(2):
        out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        _sums[(1,)](a, b, out, N=2)
        assert out.tolist() == [5, 5]
        assert (tl.load, tl.sum, tl.tensor.__add__, tl.math.exp) == before
