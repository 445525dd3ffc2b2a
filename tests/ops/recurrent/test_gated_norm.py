"""The gated norm against transformers' modules, and its kernel against both.  Under the interpreter where there is no GPU."""

from inspect import signature
from typing import Any

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from specdec.ops.recurrent.gates.gated_norm import DELTA, FALCON, FALCON_GATE_FIRST, KIMI, MAMBA, NormForm, gated_norm
from specdec.ops.recurrent.gates.gated_norm_triton import launch_gated_norm

# The norm that Nemotron-H's layers use: transformers 5.17 has Zamba 2's there.
(NEMOTRON,) = {kind for name, kind in vars(modeling_nemotron_h).items() if name.endswith("RMSNormGated")}
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(module: Any, x: Tensor, z: Tensor, weight: Tensor, want: Tensor, form: NormForm) -> None:
    """z: with heads beside it that belong to others."""
    assert torch.equal(gated_norm(x, z, weight, module.variance_epsilon, form), want)
    on_device = (each.to(DEVICE) for each in (x, z, weight))
    got = launch_gated_norm(*on_device, module.variance_epsilon, form).cpu()
    if DEVICE.type == "cuda" or x.dtype != torch.bfloat16:  # to which the interpreter rounds wrongly
        torch.testing.assert_close(got, want, atol=TOLERANCE[x.dtype], rtol=TOLERANCE[x.dtype])


def inputs(T: int, H: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(T, H, V).to(dtype), torch.randn(T, H + 2, V).to(dtype)[:, :H]


@pytest.mark.parametrize(("T", "H", "V"), [(1, 5, 48), (3, 40, 128)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_norm_with_its_gate_is_transformers_(T: int, H: int, V: int, dtype: torch.dtype) -> None:
    """Keeps out: a gate before the norm, a weight that meets unrounded numbers, or in Kimi's norm rounded ones, a padded column
    in the mean, strides taken for dense, SiLU in place of a sigmoid.
    """
    x, z = inputs(T, H, V, dtype)
    for kind, form in ((Qwen3NextRMSNormGated, DELTA), (KimiLinearRMSNormGated, KIMI)):
        module = kind(V, eps=1e-5).to(dtype)
        module.weight.data = torch.randn(V).to(dtype)
        with torch.inference_mode():
            check(module, x, z, module.weight, module(x, z), form)


@pytest.mark.parametrize(("T", "G", "V"), [(1, 3, 48), (3, 8, 512), (2, 1, 4096)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_norm_of_groups_is_transformers_(T: int, G: int, V: int, dtype: torch.dtype) -> None:
    """Keeps out: a gate on the wrong side of the norm, one group's weights for all, a mean over other channels, weights that
    meet rounded numbers in one family and unrounded ones in another.
    """
    x, z = inputs(T, G, V, dtype)
    weight = torch.randn(G * V).to(dtype)
    kinds: list[Any] = [NEMOTRON]  # in transformers 5.17 the other two norm all channels together, whatever the groups
    kinds += [each for each in (GraniteMoeHybridRMSNormGated, BambaRMSNormGated) if "group_size" in signature(each).parameters]
    modules = [(kind(G * V, V, eps=1e-5), MAMBA) for kind in kinds]
    modules += [
        (FalconH1RMSNormGated(G * V, 1e-5, G, norm_before_gate=first), form)
        for first, form in ((True, FALCON), (False, FALCON_GATE_FIRST))
    ]
    for module, form in modules:
        module.to(dtype).weight.data = weight
        with torch.inference_mode():
            want = module(x.flatten(1)[None], z.flatten(1)[None])[0]
            check(module, x, z, weight.view(G, V), want.view(T, G, V), form)
