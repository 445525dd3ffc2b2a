"""The norm after the gated delta rule: x / rms(x) * weight * silu(z), of each head apart, as in Qwen3-Next and Qwen3.5.

Rounded as in transformers: what is normed, in x's dtype, and its product with the weight; then once more, after the gate.  On
a GPU it is one launch of gated_norm_triton.py.

Shapes: T tokens, H value heads, V their width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels


def gated_norm(out_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """[T, H, V], in out's dtype.  rms(x) = sqrt(mean(x ** 2) + eps).  z's tokens may be strided."""
    if use_kernels(out_THV):
        from specdec.ops.recurrent.gates.gated_norm_triton import launch_gated_norm

        return launch_gated_norm(out_THV, z_THV, weight_V, eps)
    wide = torch.promote_types(out_THV.dtype, torch.float32)
    normed_THV = F.rms_norm(out_THV.to(wide), weight_V.shape, None, eps).to(out_THV.dtype)
    return (weight_V * normed_THV * F.silu(z_THV.to(wide))).to(out_THV.dtype)


def sigmoid_gated_norm(out_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """[T, H, V], in out's dtype: x / rms(x) * weight * sigmoid(z), rounded once, as in Kimi Linear."""
    wide = torch.promote_types(out_THV.dtype, torch.float32)
    normed_THV = F.rms_norm(out_THV.to(wide), weight_V.shape, weight_V.to(wide), eps)
    return (normed_THV * z_THV.to(wide).sigmoid()).to(out_THV.dtype)
