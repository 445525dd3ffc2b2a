"""The module of the convolutions around one sublayer: its weights, and how a layer calls them (convolve.py).

Shapes: R rows of blocks, H hidden, T taps, X what a row's kernels take, C rows below.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from specdec.draft.block.dflash2.convolve import AFTER, BEFORE, convolve, convolve_add_norm
from specdec.draft.formats.parts import Part
from specdec.draft.formats.spec import SlotConvolution
from specdec.models.layers import NoNorm, RMSNorm
from specdec.models.linear import Linear
from specdec.models.making import new_weight
from specdec.ops.products.partials import Partials


class SublayerConvolution(nn.Module):
    """Convolves a sublayer's input and its output; what the row adds to both kernels comes of the input.

    base_kernel: [2, T, H].  kernel_projection: from a row to what it adds to its kernels.  size: rows of a block.
    """

    def __init__(self, hidden_size: int, sizes: SlotConvolution, size: int) -> None:
        super().__init__()
        self.size = size
        self.base_kernel = new_weight(2, sizes.taps, hidden_size)
        self.kernel_projection = Linear(hidden_size, 2 * sizes.taps * (hidden_size // sizes.group))

    def parts(self, name: str) -> Iterator[Part]:
        yield f"{name}.base_kernel", self.base_kernel
        yield f"{name}.kernel_projection", self.kernel_projection

    def before(self, x_RH: Tensor, below_CH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(the sublayer's input [R + C, H], the rows' kernels [R, X], which `after` needs).  below_CH: rows of no block."""
        own_RX = self.kernel_projection(x_RH)
        return convolve(x_RH, own_RX, self.base_kernel, BEFORE, self.size, below_CH), own_RX

    def after(self, x_RH: Tensor, delta: Tensor | Partials, own_RX: Tensor, norm: RMSNorm | NoNorm) -> tuple[Tensor, Tensor]:
        """(residual stream with the convolved output of the sublayer, its norm).  As of `RMSNorm.add`."""
        assert isinstance(norm, RMSNorm)
        if norm.group.size == 1:
            return convolve_add_norm(x_RH, delta, own_RX, self.base_kernel, self.size, norm.weight, norm.eps)
        assert isinstance(delta, Tensor), "ranks exchange sums"
        return norm.add(x_RH, convolve(delta, own_RX, self.base_kernel, AFTER, self.size))  # of a sum as of its terms
