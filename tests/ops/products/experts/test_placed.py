"""Experts with many rows each, by the kernel for Hopper GPUs, against their definition.

Shapes: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

import pytest
import torch
from toolkit.kernels import DEVICE, HAS_GPU

from specdec.models.mixtures.products import masked_experts, placed_experts
from specdec.ops.products.experts import PLAIN, DenseExperts, Form, Relu2, SwiGLU, grouped_tiles
from specdec.ops.products.numerics import FAST


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(0.3).to(DEVICE)


FORMS = (PLAIN, Form(SwiGLU(1.702, 0.5), rand(6, 2 * 136, seed=3), rand(6, 264, seed=4)), Form(skips=True), Form(Relu2()))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.get_device_capability() != (9, 0), reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize("T", [3, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_experts_equal_the_definition(form: Form, dtype: torch.dtype, T: int) -> None:
    """Keeps out: rows of another expert in a tile, an expert without rows, a warpgroup without rows that frees a stage twice, a
    result that is written over the next expert's rows, gates taken for ups, and biases of another expert.
    """
    E, K, H, F = 6, 2, 264, 136
    rows = F if isinstance(form.activation, Relu2) else 2 * F
    x, gate_up, down = (rand(*shape).to(dtype) for shape in ((T, H), (E, rows, H), (E, H, F)))
    form = form._replace(
        gate_up_bias=None if form.gate_up_bias is None else form.gate_up_bias.to(dtype),
        down_bias=None if form.down_bias is None else form.down_bias.to(dtype),
    )
    scores_TE = torch.rand(T, E, generator=torch.Generator().manual_seed(T))
    scores_TE[:, 1], scores_TE[:, 0] = -1, 2  # no token chooses expert 1, and all choose expert 0
    weights_TK, ids_TK = torch.rand(T, K).to(DEVICE), scores_TE.topk(K).indices.to(DEVICE)
    if form.skips:
        weights_TK[1::3], ids_TK[1::3] = 0, E
    biases = [None if bias is None else bias.double() for bias in (form.gate_up_bias, form.down_bias)]
    wide = x.double(), weights_TK.double(), ids_TK, gate_up.double(), down.double()
    want = masked_experts(*wide, Form(form.activation, *biases, skips=form.skips))
    with torch.inference_mode():
        tiles = grouped_tiles(x, DenseExperts(gate_up, down, form), FAST)
        assert tiles is not None
        got = placed_experts(x, weights_TK, ids_TK, gate_up, down, form, tiles)
    assert got.dtype == dtype and (got.double() - want).norm() < 6e-3 * want.norm()
