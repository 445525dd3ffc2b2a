"""The norm after a recurrent rule, with its gate: x / rms(x) * weight, times what z opens, of each head or group apart.

Families differ in where the gate stands and in what is rounded (NormForm), as transformers has it.  On a GPU it is one launch
of gated_norm_triton.py.

Shapes: T tokens, H value heads, or groups of channels that are normed together, V their width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels


class NormForm(NamedTuple):
    """sigmoid: the gate is sigmoid(z), and not silu(z).  gate_first: it multiplies what is normed, not what the norm gives.

    rounded: what the norm divides is rounded to x's dtype before the weight multiplies it, and so is their product; if not,
    nothing is rounded before the end.
    """

    sigmoid: bool = False
    gate_first: bool = False
    rounded: bool = False


DELTA = NormForm(rounded=True)  # of the gated delta rule, as in Qwen3-Next and Qwen3.5
KIMI = NormForm(sigmoid=True)
MAMBA = NormForm(gate_first=True, rounded=True)  # as in Nemotron-H, Granite 4 and Bamba
FALCON, FALCON_GATE_FIRST = NormForm(), NormForm(gate_first=True)


def gated_norm(out_THV: Tensor, z_THV: Tensor, weight: Tensor, eps: float, form: NormForm = DELTA) -> Tensor:
    """[T, H, V], in out's dtype.  rms(x) = sqrt(mean(x ** 2) + eps).  weight: [V] for all heads, or [H, V].

    z's tokens may be strided.
    """
    if use_kernels(out_THV):
        from specdec.ops.recurrent.gates.gated_norm_triton import launch_gated_norm

        return launch_gated_norm(out_THV, z_THV, weight, eps, form)
    wide = torch.promote_types(out_THV.dtype, torch.float32)
    x_THV, gate_THV = out_THV.to(wide), (torch.sigmoid if form.sigmoid else F.silu)(z_THV.to(wide))
    if form.gate_first:
        x_THV = x_THV * gate_THV
    normed_THV = F.rms_norm(x_THV, weight.shape[-1:], None, eps)
    scaled_THV = weight * normed_THV.to(out_THV.dtype) if form.rounded else weight.to(wide) * normed_THV
    return (scaled_THV if form.gate_first else scaled_THV * gate_THV).to(out_THV.dtype)
