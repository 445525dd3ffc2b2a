"""What lies between the qkv projection and attention: an optional norm of queries and keys, and rotary positions.

`HeadPrep.apply_` is the definition; attention/kernels/rope_store_triton.py does the same and stores keys and values in one
launch.  This module knows no cache.

Shapes: T tokens, Q query heads, K kv heads, X = Q + 2K, D head dim, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


class Rotation:
    """Rotary position embedding (RoPE, arXiv 2104.09864) of one forward pass's tokens.

    table_P2D: for each position, cosines, then sines that carry the sign of rotate_half, so that rotating only needs a roll.
    positions_T: int64.
    """

    def __init__(self, table_P2D: Tensor, positions_T: Tensor) -> None:
        self.table_P2D, self.positions_T = table_P2D, positions_T

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the tokens, [T, 1, D] each.  All layers of the pass share them."""
        rows = self.table_P2D.index_select(0, self.positions_T)
        return rows[:, :1], rows[:, 1:]

    def rotate_(self, x_THD: Tensor) -> None:
        """Rotates in place: x * cos + rotate_half(x) * sin."""
        cos, sin = self.cos_sin
        rolled = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
        x_THD.mul_(cos).addcmul_(rolled, sin)


@dataclass(frozen=True)
class HeadPrep:
    """What has to be done to a layer's fresh queries and keys before attention.

    rotation: None if they are rotated already.
    norm_HD: a norm weight for each query and key head (Qwen3's q/k norm over head_dim), or None.  It may be wider than they are
        (zero-centred norms): then what is normed is rounded after the product with it alone.
    eps: the epsilon of that norm.
    """

    rotation: Rotation | None
    num_kv_heads: int
    norm_HD: Tensor | None = None
    eps: float = 0.0

    def apply_(self, qkv_TXD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, Q, D] and keys and values [T, 2, K, D]: both are views of the input, which is changed in place."""
        T, X, D = qkv_TXD.shape
        K = self.num_kv_heads
        qk_THD = qkv_TXD[:, : X - K]
        if self.norm_HD is not None:
            read_THD = qk_THD.clone() if qk_THD.requires_grad else qk_THD  # a gradient needs what the norm read
            qk_THD.copy_(F.rms_norm(read_THD.to(self.norm_HD.dtype), (D,), None, self.eps) * self.norm_HD)
        if self.rotation is not None:
            self.rotation.rotate_(qk_THD)
        return qkv_TXD[:, : X - 2 * K], qkv_TXD[:, X - 2 * K :].view(T, 2, K, D)


def rotary_table(inv_freq: Tensor, max_positions: int) -> Tensor:
    """[P, 2, D]: cosines and signed sines of every position.  inv_freq: [D/2] angles by which a pair turns at each position."""
    angles = torch.outer(torch.arange(max_positions, dtype=torch.int64, device=inv_freq.device).float(), inv_freq)
    sign = torch.cat((-torch.ones_like(inv_freq), torch.ones_like(inv_freq)))
    both = torch.cat((angles, angles), dim=-1)
    return torch.stack((both.cos(), both.sin() * sign), dim=1)


def by_halves(rows: Tensor, head_dim: int, rotated: int, interleaved: bool = False) -> Tensor:
    """Rows of heads (of a weight, a bias or a norm) of which only the first `rotated` values are turned, in our kernels' order.

    Our kernels turn whole heads and pair value i with value i + head_dim / 2.  A checkpoint pairs the first values among
    themselves, i with i + rotated / 2, or (interleaved) 2i with 2i + 1.  So the pairs' first members go to the front of the
    head's first half, their second members to the front of its second half, and the others after them, with angles of 0.
    Products of queries and keys stay the same.
    """
    half = head_dim // 2
    pairs = range(0, rotated, 2) if interleaved else range(rotated // 2)
    first = [*pairs, *range(rotated, rotated + half - rotated // 2)]
    second = [value for value in range(head_dim) if value not in first]
    order_D = torch.tensor(first + second, dtype=torch.int64, device=rows.device)
    return rows.unflatten(0, (-1, head_dim)).index_select(1, order_D).flatten(0, 1)
