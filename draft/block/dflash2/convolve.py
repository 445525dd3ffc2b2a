"""Convolutions over the rows of a block, with kernels that depend on the row: DFlash2's, before and after a sublayer.

Row i of a block becomes the sum over taps t of (base[t] + own[i, t]) * row i - t; rows before the block's first one count as
zeros.  `own` is what the row's own kernel adds to the learned one, the same for all columns of a group.  What stands around a
convolution is fused with it: rows that follow in the next product, and the residual sum and norm after a sublayer.  On a CPU
and under autograd the definitions here run; on a GPU each function is one launch of convolve_triton.py.

Shapes: R rows of blocks of B each, H hidden, T taps, G groups, X = 2 * T * G (before and after, slowest; then tap, then group),
C rows below.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.norm import add_rms_norm
from specdec.ops.products.partials import Partials, added_up

BEFORE, AFTER = 0, 1


def convolve(
    x_RH: Tensor, own_RX: Tensor, base_2TH: Tensor, side: int, size: int, below_CH: Tensor | None = None
) -> Tensor:  # fmt: skip
    """[R + C, H]: the convolved rows, and then those below, as they are.  Sums in float32, rounded once.

    side: BEFORE or AFTER.  size: B.
    """
    if use_kernels(x_RH):
        from specdec.draft.block.dflash2.convolve_triton import launch_convolve

        return launch_convolve(x_RH, own_RX, base_2TH, side, size, below_CH)
    (R, H), T = x_RH.shape, base_2TH.shape[1]
    wide = torch.promote_types(x_RH.dtype, torch.float32)
    own_RTG = own_RX.view(R, 2, T, -1)[:, side].to(wide)
    kernel_RTH = base_2TH[side].to(wide) + own_RTG.repeat_interleave(H // own_RTG.shape[2], -1)
    blocks, kernels = x_RH.to(wide).view(-1, size, H), kernel_RTH.view(-1, size, T, H)
    total = kernels[:, :, 0] * blocks
    for tap in range(1, T):
        later = kernels[:, tap:, tap] * blocks[:, : size - tap]
        total = torch.cat((total[:, :tap], total[:, tap:] + later), dim=1)
    convolved_RH = total.reshape(R, H).to(x_RH.dtype)
    return convolved_RH if below_CH is None else torch.cat((convolved_RH, below_CH))


def convolve_add_norm(
    x_RH: Tensor, delta: Tensor | Partials, own_RX: Tensor, base_2TH: Tensor, size: int, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + what a sublayer gave, convolved; the norm of that sum), [R, H] each.  See `add_rms_norm`."""
    if use_kernels(x_RH):
        from specdec.draft.block.dflash2.convolve_triton import launch_convolve_add_norm

        return launch_convolve_add_norm(x_RH, delta, own_RX, base_2TH, size, weight_H, eps)
    return add_rms_norm(x_RH, convolve(added_up(delta), own_RX, base_2TH, AFTER, size), weight_H, eps)
