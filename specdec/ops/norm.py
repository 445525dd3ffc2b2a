"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), fused with what comes right before it.

That is the residual sum, the reading of embeddings, or EAGLE-3's pair of inputs.  What follows may want other rows below the
normed ones, in one matrix.  On a CPU and under autograd each function runs its definition here; on a GPU it is one launch of
norm_triton.py.  Both round a sum to its dtype before it is normed, and what was normed once: after the product with the weight.
So a weight may be wider than x: zero-centred norms keep 1 + w in float32.

Shapes: T tokens, H hidden, V vocabulary, C rows below, X width of a row, P of its parts that are normed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.operator import define, use_operator
from specdec.ops.products.partials import Delta, NormedProduct, added_up


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim; rms(x) = sqrt(mean(x ** 2) + eps)."""
    if use_operator(x):
        return RMS_NORM(x, weight_H, eps)
    if use_kernels(x):
        from specdec.ops.norm_triton import launch_add_rms_norm

        return launch_add_rms_norm(x, None, weight_H, eps)[1]
    return _normed(x, weight_H, eps)


def _normed(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    if weight_H.dtype == x.dtype:
        return F.rms_norm(x, weight_H.shape, weight_H, eps)
    return F.rms_norm(x.to(weight_H.dtype), weight_H.shape, weight_H, eps).to(x.dtype)


def add_rms_norm(
    x_TH: Tensor,
    delta_TH: Delta | NormedProduct,
    weight_H: Tensor,
    eps: float,
    out_TH: Tensor | None = None,
    below_CH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm): the new residual stream, and the input of the next block.

    A `NormedProduct` is normed first, and its sum with x may be multiplied with a number.
    out_TH: memory for the sum; its rows may be strided.  below_CH: rows that follow the normed ones in the second result.
    """
    if use_kernels(x_TH):
        from specdec.ops.norm_triton import launch_add_rms_norm

        return launch_add_rms_norm(x_TH, delta_TH, weight_H, eps, out_TH=out_TH, below_CH=below_CH)
    if isinstance(delta_TH, NormedProduct):
        total_TH = x_TH + rms_norm(added_up(delta_TH.product), delta_TH.weight_N, delta_TH.eps)
        total_TH = total_TH if delta_TH.scale_1 is None else total_TH * delta_TH.scale_1
        normed_TH = rms_norm(total_TH, weight_H, eps)
        return total_TH if out_TH is None else out_TH.copy_(total_TH), _above(normed_TH, below_CH)
    delta_TH = added_up(delta_TH)
    if use_operator(x_TH):
        total_TH, normed_TH = ADD_RMS_NORM(x_TH, delta_TH, weight_H, eps)
    else:
        total_TH = x_TH + delta_TH
        normed_TH = _normed(total_TH, weight_H, eps)
    return total_TH if out_TH is None else out_TH.copy_(total_TH), _above(normed_TH, below_CH)


def add_normed(x_TH: Tensor, delta_TH: Delta, weight_H: Tensor | None, eps: float = 0.0) -> Tensor:
    """x + the norm of delta, of families that norm what a block gives; weight None: x + delta, which is not normed."""
    if use_kernels(x_TH):
        from specdec.ops.norm_triton import launch_add_normed

        return launch_add_normed(x_TH, delta_TH, weight_H, eps)
    return x_TH + (added_up(delta_TH) if weight_H is None else rms_norm(added_up(delta_TH), weight_H, eps))


def embed_rms_norm(
    ids_T: Tensor, table_VH: Tensor, weight_H: Tensor, eps: float, below_CH: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(the embeddings of the ids (int64), their norm).  below_CH: as of `add_rms_norm`."""
    if use_kernels(table_VH):
        from specdec.ops.norm_triton import launch_add_rms_norm

        return launch_add_rms_norm(table_VH, None, weight_H, eps, ids_T=ids_T, below_CH=below_CH)
    x_TH = F.embedding(ids_T, table_VH)
    return x_TH, _above(rms_norm(x_TH, weight_H, eps), below_CH)


def _above(x_TH: Tensor, below_CH: Tensor | None) -> Tensor:
    return x_TH if below_CH is None else torch.cat((x_TH, below_CH))


def pair_rms_norm(
    ids_T: Tensor, table_VH: Tensor, table_weight_H: Tensor, x_TH: Tensor, weight_H: Tensor, eps: float
) -> Tensor:
    """[T, 2H]: the normed embeddings of the ids (int64), then the normed x, each under its own weight."""
    if use_kernels(x_TH):
        from specdec.ops.norm_triton import launch_pair_rms_norm

        return launch_pair_rms_norm(ids_T, table_VH, table_weight_H, x_TH, weight_H, eps)
    embedded_TH = _normed(F.embedding(ids_T, table_VH), table_weight_H, eps)
    return torch.cat((embedded_TH, _normed(x_TH, weight_H, eps)), dim=-1)


def part_squares(x_TX: Tensor, sizes: Sequence[int]) -> Tensor:
    """[T, P] float32 (or a wider dtype): the sum of squares of each of a row's first parts, of so many numbers each."""
    if use_kernels(x_TX):
        from specdec.ops.norm_triton import launch_part_squares

        return launch_part_squares(x_TX, sizes)
    wide_TX = x_TX.to(torch.promote_types(x_TX.dtype, torch.float32))
    return torch.stack([part.square().sum(-1) for part in wide_TX[:, : sum(sizes)].split(list(sizes), dim=-1)], dim=-1)


def norm_parts(
    x_TX: Tensor, weights: Sequence[Tensor], eps: float, squares_TP: Tensor | None = None, sharers: int = 1
) -> Tensor:  # fmt: skip
    """The rows, with each of their first parts divided by its rms and times its weights.  x may be overwritten.

    squares_TP: the sums of squares over as many such parts as there are `sharers`; None: over the rows' own.
    """
    sizes = [len(weight) for weight in weights]
    if use_kernels(x_TX):
        from specdec.ops.norm_triton import launch_norm_parts

        return launch_norm_parts(x_TX, weights, eps, squares_TP, sharers)
    squares_TP = part_squares(x_TX, sizes) if squares_TP is None else squares_TP
    *parts, rest = x_TX.split([*sizes, x_TX.shape[1] - sum(sizes)], dim=-1)
    normed = [
        (part * (squares_T / (size * sharers) + eps).rsqrt()[:, None] * weight).to(x_TX.dtype)
        for part, size, weight, squares_T in zip(parts, sizes, weights, squares_TP.unbind(-1), strict=True)
    ]
    return torch.cat((*normed, rest), dim=-1)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _add_rms_norm_fake(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


RMS_NORM = define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm, _rms_norm_fake)
ADD_RMS_NORM = define(
    "add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)", add_rms_norm, _add_rms_norm_fake
)
