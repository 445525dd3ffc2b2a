"""Sums of the terms that ranks have computed, fused with the residual stream that they belong to and with the norm after it.

Terms are added in the order of ranks, in float32 or wider, then to the residual, and rounded once: the result has the same bits
on every rank, whatever the number of rows.  On a CPU the definitions here run; on a GPU each function is one launch of
terms_triton.py.

Shapes: N ranks, T tokens, H hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels


def add_terms(x_TH: Tensor | None, terms_NTH: Tensor) -> Tensor:
    """x + all terms; without x, the sum of the terms."""
    if use_kernels(terms_NTH):
        from specdec.ops.terms_triton import launch_add_terms

        return launch_add_terms(x_TH, terms_NTH)
    wide = torch.promote_types(terms_NTH.dtype, torch.float32)
    total_TH = terms_NTH[0].to(wide)
    for term_TH in terms_NTH[1:]:
        total_TH = total_TH + term_TH.to(wide)
    total_TH = total_TH if x_TH is None else x_TH.to(wide) + total_TH
    return total_TH.to(terms_NTH.dtype)


def add_terms_rms_norm(x_TH: Tensor, terms_NTH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + all terms, its norm): the new residual stream, and the input of the next block."""
    if use_kernels(terms_NTH):
        from specdec.ops.terms_triton import launch_add_terms_rms_norm

        return launch_add_terms_rms_norm(x_TH, terms_NTH, weight_H, eps)
    x_TH = add_terms(x_TH, terms_NTH)
    return x_TH, F.rms_norm(x_TH, weight_H.shape, weight_H, eps)
