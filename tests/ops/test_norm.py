"""The norm kernels against their definition.  Under Triton's interpreter where there is no GPU.

Shapes: T tokens, H hidden, V vocabulary.
"""

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.ops.norm import add_rms_norm, pair_rms_norm, rms_norm
from specdec.ops.norm_triton import launch_add_rms_norm, launch_pair_rms_norm

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
EPS = 1e-5


def rand(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), atol=tolerance, rtol=tolerance)


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "H"), [(1, 64), (3, 300), (70, 4096)])
def test_sum_and_norm_equal_the_definition(T: int, H: int, dtype: torch.dtype) -> None:
    """Keeps out: a padded column counted in the mean, a norm of the unrounded sum, rows taken for dense."""
    x = rand(T, H + 8, seed=1, dtype=dtype)[:, :H]
    delta, weight = rand(T, H, seed=2, dtype=dtype), rand(H, seed=3, dtype=dtype)
    total, normed = launch_add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    rounded = (x + delta).double().cpu()
    check(normed, add_rms_norm(rounded, torch.zeros_like(rounded), weight.double().cpu(), EPS)[1])
    same, alone = launch_add_rms_norm(x, None, weight, EPS)
    assert same is x
    check(alone, rms_norm(x.double().cpu(), weight.double().cpu(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pair_norm_equals_the_definition(dtype: torch.dtype) -> None:
    """Keeps out: the two halves or their weights swapped, an id that reads another's embedding."""
    T, H, V = 5, 96, 40
    table, x = rand(V, H, seed=4, dtype=dtype), rand(T, 3 * H, seed=5, dtype=dtype)[:, H : 2 * H]
    first, second = rand(H, seed=6, dtype=dtype), rand(H, seed=7, dtype=dtype)
    ids = torch.randint(V, (T,), generator=torch.Generator().manual_seed(8)).to(DEVICE)
    exact = [t.double().cpu() for t in (table, first, x, second)]
    want = pair_rms_norm(ids.cpu(), *exact, EPS)
    check(launch_pair_rms_norm(ids, table, first, x, second, EPS), want)
    assert launch_pair_rms_norm(ids[:0], table, first, x[:0], second, EPS).shape == (0, 2 * H)
