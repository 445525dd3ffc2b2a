"""The gate and the norm after Mamba-2's rule: of groups of a token's outputs, or the gate alone.

Most families multiply by silu(z) first, and divide each group by its root mean square then (`GATE_FIRST`).  Falcon-H1 has three
variants: norm first, gate first, and no norm at all; its norms round once, at the end.  This module knows no layer.

Rounded as in transformers: the gate's product and the norm are computed in float32 or wider.  What is normed is rounded to
out's dtype and multiplied by the weight then, unless the rule rounds once.  Without a norm, silu(z) is rounded before the
product with it.

Shapes: T tokens, Y outputs of a token, G groups of neighbouring outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class GroupNormRule:
    """gate_first: whether what is normed has been multiplied by silu(z); otherwise the gate multiplies what was normed.

    rounds_once: whether the weight is multiplied in float32 too.
    """

    gate_first: bool = True
    rounds_once: bool = False


GATE_FIRST = GroupNormRule()


def gated_group_norm(
    out_TY: Tensor, z_TY: Tensor, weight_Y: Tensor, groups: int, eps: float, rule: GroupNormRule = GATE_FIRST
) -> Tensor:
    """[T, Y], in out's dtype.  rms(x) = sqrt(mean(x ** 2) + eps), of each group apart.  z's tokens may be strided."""
    dtype = out_TY.dtype
    wide = torch.promote_types(dtype, torch.float32)
    x_TY, gate_TY = out_TY.to(wide), F.silu(z_TY.to(wide))
    if rule.gate_first:
        x_TY = x_TY * gate_TY
    x_TGY = x_TY.unflatten(1, (groups, -1))
    normed_TY = F.rms_norm(x_TGY, x_TGY.shape[2:], None, eps).flatten(1)
    normed_TY = weight_Y.to(wide) * normed_TY if rule.rounds_once else weight_Y * normed_TY.to(dtype)
    return normed_TY.to(dtype) if rule.gate_first else (normed_TY * gate_TY).to(dtype)


def gate(out_TY: Tensor, z_TY: Tensor) -> Tensor:
    """[T, Y], in out's dtype: the outputs times silu(z), without a norm.  z's tokens may be strided."""
    return out_TY * F.silu(z_TY)
