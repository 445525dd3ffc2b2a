"""The gated norm against transformers' module, and its kernel against both.  Under the interpreter where there is no GPU."""

import pytest
import torch
from toolkit.kernels import DEVICE
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from specdec.ops.recurrent.gates.gated_norm import gated_norm, sigmoid_gated_norm
from specdec.ops.recurrent.gates.gated_norm_triton import launch_gated_norm

TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(("T", "H", "V"), [(1, 5, 48), (3, 40, 128)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_norm_with_its_gate_is_transformers_(T: int, H: int, V: int, dtype: torch.dtype) -> None:
    """Keeps out: a gate before the norm, a weight that meets unrounded numbers, a padded column in the mean, strides taken for
    dense.
    """
    module = Qwen3NextRMSNormGated(V, eps=1e-5).to(dtype)
    module.weight.data = torch.randn(V).to(dtype)
    x, z = torch.randn(T, H, V).to(dtype), torch.randn(T, H + 2, V).to(dtype)[:, :H]
    with torch.inference_mode():
        want = module(x, z)
        assert torch.equal(gated_norm(x, z, module.weight, 1e-5), want)
        got = launch_gated_norm(x.to(DEVICE), z.to(DEVICE), module.weight.to(DEVICE), 1e-5).cpu()
    if DEVICE.type == "cuda" or dtype != torch.bfloat16:  # to which the interpreter rounds wrongly
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@torch.inference_mode()
def test_a_norm_with_a_sigmoid_is_transformers_(dtype: torch.dtype) -> None:
    """Keeps out: what is normed, or its product with the weight, rounded before the gate; a gate that is SiLU."""
    module = KimiLinearRMSNormGated(48, eps=1e-5).to(dtype)
    module.weight.data = torch.randn(48).to(dtype)
    x, z = torch.randn(3, 5, 48).to(dtype), torch.randn(3, 7, 48).to(dtype)[:, :5]
    got, want = sigmoid_gated_norm(x, z, module.weight, 1e-5), module(x, z)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)
    assert float((got == want).float().mean()) > 0.9
