"""RMSNorm (Zhang and Sennrich 2019) and what stands right before it: the residual sum, or EAGLE-3's pair of inputs.

Each function is the definition on a CPU and under autograd, and one launch of `norm_triton.py` on a GPU.  A sum is rounded
to its dtype before it is normed, in both.

Shapes: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, over the last dim."""
    if use_kernels(x):
        from specdec.ops.norm_triton import launch_add_rms_norm

        return launch_add_rms_norm(x, None, weight_H, eps)[1]
    return F.rms_norm(x, weight_H.shape, weight_H, eps)


def add_rms_norm(x_TH: Tensor, delta_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm): the residual stream and what the next block reads."""
    if use_kernels(x_TH):
        from specdec.ops.norm_triton import launch_add_rms_norm

        return launch_add_rms_norm(x_TH, delta_TH, weight_H, eps)
    x_TH = x_TH + delta_TH
    return x_TH, F.rms_norm(x_TH, weight_H.shape, weight_H, eps)


def pair_rms_norm(
    ids_T: Tensor, table_VH: Tensor, table_weight_H: Tensor, x_TH: Tensor, weight_H: Tensor, eps: float
) -> Tensor:
    """[T, 2H]: the normed embeddings of the ids beside the normed x, each under its own weight."""
    if use_kernels(x_TH):
        from specdec.ops.norm_triton import launch_pair_rms_norm

        return launch_pair_rms_norm(ids_T, table_VH, table_weight_H, x_TH, weight_H, eps)
    embedded_TH = F.rms_norm(F.embedding(ids_T, table_VH), table_weight_H.shape, table_weight_H, eps)
    return torch.cat((embedded_TH, F.rms_norm(x_TH, weight_H.shape, weight_H, eps)), dim=-1)
