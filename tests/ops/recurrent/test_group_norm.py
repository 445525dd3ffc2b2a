"""The norm of groups after Mamba-2's rule is transformers', in each family's variant, and rounds as there.

Keeps out: a gate after the norm where it comes before, one norm over all groups, a weight multiplied before or after rounding.
"""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

from specdec.ops.recurrent.gates.group_norm import GATE_FIRST, GroupNormRule, gate, gated_group_norm

TOKENS, GROUPS, EPS = 7, 3, 1e-5


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, gates whose tokens are strided, as those of a projection are, and a weight."""
    generator = torch.Generator().manual_seed(4)
    out, both = (torch.randn(TOKENS, size, generator=generator).to(dtype) for size in (48, 60))
    return out, both[:, 6:54], (1 + 0.3 * torch.randn(48, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["granite", "falcon gate first", "falcon norm first", "falcon gate alone"])
@torch.no_grad()
def test_each_variant_is_transformers(variant: str, dtype: torch.dtype) -> None:
    out, z, weight = drawn(dtype)
    if variant == "falcon gate alone":
        assert torch.equal(gate(out, z), out * F.silu(z))
        return
    if variant == "granite":
        rule, norm = GATE_FIRST, GraniteMoeHybridRMSNormGated(48, 48 // GROUPS, EPS)
    else:
        before = variant == "falcon norm first"
        rule, norm = GroupNormRule(gate_first=not before, rounds_once=True), FalconH1RMSNormGated(48, EPS, GROUPS, before)
    norm.weight.data = weight
    got = gated_group_norm(out, z, weight, GROUPS, EPS, rule)
    assert got.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(got, norm(out, z), atol=2e-6, rtol=2e-6)
    else:
        assert float((got == norm(out, z)).float().mean()) > 0.99


def test_float64_stays() -> None:
    """Keeps out: a model in float64 whose norms round to float32."""
    out, z, weight = (x.double() for x in drawn(torch.float32))
    assert gated_group_norm(out, z, weight, GROUPS, EPS).dtype == torch.float64
