"""Sums of ranks' terms: the kernel against the definition, and the definition against float64."""

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.ops.terms import add_terms, add_terms_rms_norm
from specdec.ops.terms_triton import launch_add_terms, launch_add_terms_rms_norm

EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("N", "T", "H"), [(2, 3, 96), (3, 1, 64)])
def test_kernel_equals_the_definition(N: int, T: int, H: int, dtype: torch.dtype) -> None:
    """Keeps out: terms added in another order, or rounded one by one; a norm of what was not rounded."""
    check(N, T, H, dtype)


@pytest.mark.gpu
def test_bfloat16() -> None:
    """Keeps out: a sum in 16 bit."""
    for N, T, H in ((2, 7, 4096), (8, 64, 8192), (4, 1, 100)):
        check(N, T, H, torch.bfloat16)


def check(N: int, T: int, H: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(T)
    terms_NTH = torch.randn(N, T, H, generator=generator).to(dtype)
    x_TH = torch.randn(T, 2 * H, generator=generator).to(dtype)[:, :H]  # its rows are strided
    weight_H = torch.rand(H, generator=generator).to(dtype)
    total_TH, normed_TH = add_terms_rms_norm(x_TH, terms_NTH, weight_H, EPS)
    exact_TH = x_TH.double() + terms_NTH.double().sum(0)
    torch.testing.assert_close(total_TH.double(), exact_TH, rtol=torch.finfo(dtype).eps, atol=1e-6)
    given = terms_NTH.to(DEVICE), weight_H.to(DEVICE)
    got_TH, got_normed_TH = launch_add_terms_rms_norm(x_TH.to(DEVICE), *given, EPS)
    assert torch.equal(got_TH.cpu(), total_TH)
    torch.testing.assert_close(got_normed_TH.cpu(), normed_TH, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(launch_add_terms(x_TH.to(DEVICE), given[0]).cpu(), add_terms(x_TH, terms_NTH))
    assert torch.equal(launch_add_terms(None, given[0]).cpu(), add_terms(None, terms_NTH))
    assert torch.equal(launch_add_terms(None, given[0][:, :, 0].contiguous()).cpu(), add_terms(None, terms_NTH[:, :, 0]))
