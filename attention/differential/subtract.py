"""What differential attention does to the outputs of its two softmaxes: weighted difference, norm and scale.

On a GPU a kernel computes it (subtract_triton.py); `subtract_halves` says what.  This module knows no keys and no values.

Shapes: T tokens, H query heads, K key heads, I = K / 2 pairs of key heads, G = H / K, E value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels


class Difference(NamedTuple):
    """The parameters of one layer's difference.

    factor: float32 without dims, the factor lambda of the second softmax.
    scale: of the normed difference, 1 - lambda_init.
    eps: of the norm.
    weight_E: float32, the norm's learnt weight, which all heads share; None: the norm has none.
    """

    factor: Tensor
    scale: float
    eps: float
    weight_E: Tensor | None = None


def subtract_halves(out_THE: Tensor, num_kv_heads: int, difference: Difference) -> Tensor:
    """[T, H / 2, E]: scale * norm(first - factor * second) * weight, from the outputs of a pair of query heads.

    The G query heads of key head 2i hold the first softmaxes, those of key head 2i + 1 the second ones, in the same order.
    """
    if use_kernels(out_THE):
        from specdec.attention.differential.subtract_triton import launch_subtract

        return launch_subtract(out_THE, num_kv_heads, difference)
    first, second = out_THE.unflatten(1, (num_kv_heads // 2, 2, -1)).unbind(2)
    both = first - difference.factor.to(out_THE.dtype) * second
    normed = difference.scale * F.rms_norm(both, both.shape[-1:], eps=difference.eps)
    if difference.weight_E is not None:
        normed = normed * difference.weight_E.to(normed.dtype)
    return normed.flatten(1, 2)
