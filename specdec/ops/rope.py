"""What lies between the qkv projection and attention: an optional norm of queries and keys, and rotary positions.

`HeadPrep.apply_` is the definition; attention/kernels/rope_store_triton.py does the same and stores keys and values in one
launch.  This module knows no cache.

Shapes: T tokens, Q query heads, K kv heads, X = Q + 2K, D head dim, E value dim, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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


class ValuePrep(NamedTuple):
    """What has to be done to a layer's fresh values.

    normed: they are divided by their root mean square, without a weight (Gemma 4).
    scale: what they are multiplied with (MiMo-V2-Flash's attention_value_scale).
    are_keys: the keys' projections are the values' too, before the keys are normed and rotated.  The heads are then those of
        queries and keys alone: X = Q + K.
    """

    normed: bool = False
    scale: float = 1.0
    are_keys: bool = False

    def of(self, v_TKE: Tensor, eps: float) -> Tensor:
        """The values, computed in their own dtype as a norm of queries and keys is."""
        if self.normed:
            v_TKE = F.rms_norm(v_TKE, v_TKE.shape[-1:], None, eps)
        return v_TKE if self.scale == 1.0 else v_TKE * self.scale


PLAIN_VALUES = ValuePrep()


@dataclass(frozen=True)
class HeadPrep:
    """What has to be done to a layer's fresh queries and keys before attention.

    rotation: None if they are rotated already.
    norm_HD: a norm weight for each query and key head (Qwen3's q/k norm over head_dim), or None.  It may be wider than they are
        (zero-centred norms): then what is normed is rounded after the product with it alone.
    eps: the epsilon of that norm, and of the values'.
    values: what has to be done to values.
    """

    rotation: Rotation | None
    num_kv_heads: int
    norm_HD: Tensor | None = None
    eps: float = 0.0
    values: ValuePrep = PLAIN_VALUES

    def query_heads(self, heads: int) -> int:
        """Q, of so many heads X of a token."""
        return heads - self.num_kv_heads * (1 if self.values.are_keys else 2)

    def apply_(self, qkv_TXD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, Q, D] and keys and values [T, 2, K, D]: both are views of the input, which is changed in place."""
        (T, X, D), K = qkv_TXD.shape, self.num_kv_heads
        Q, are_keys = self.query_heads(X), self.values.are_keys
        v_TKD = qkv_TXD[:, Q:] if are_keys else qkv_TXD[:, Q + K :]
        if self.values != PLAIN_VALUES:
            v_TKD = self.values.of(v_TKD.clone() if are_keys else v_TKD, self.eps)
            if not are_keys:
                qkv_TXD[:, Q + K :] = v_TKD
        self._turn_(qkv_TXD[:, : Q + K])
        kv_T2KD = torch.stack((qkv_TXD[:, Q:], v_TKD), dim=1) if are_keys else qkv_TXD[:, Q:].view(T, 2, K, D)
        return qkv_TXD[:, :Q], kv_T2KD

    def apply_rows_(self, rows_TC: Tensor, head_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Q, D], keys [T, K, D] and values [T, K, E] of rows [T, (Q + K) D + K E], whose widths differ.

        head_dim, value_dim: D and E.  Queries and keys are changed in place.
        """
        assert not self.values.are_keys
        qk_TC, v_TC = rows_TC.split((rows_TC.shape[1] - self.num_kv_heads * value_dim, self.num_kv_heads * value_dim), 1)
        qk_TXD = qk_TC.unflatten(1, (-1, head_dim))
        self._turn_(qk_TXD)
        v_TKE = self.values.of(v_TC.unflatten(1, (-1, value_dim)), self.eps)
        return qk_TXD[:, : -self.num_kv_heads], qk_TXD[:, -self.num_kv_heads :], v_TKE

    def _turn_(self, qk_THD: Tensor) -> None:
        """Norms and rotates queries and keys in place."""
        if self.norm_HD is not None:
            read_THD = qk_THD.clone() if qk_THD.requires_grad else qk_THD  # a gradient needs what the norm read
            qk_THD.copy_(F.rms_norm(read_THD.to(self.norm_HD.dtype), qk_THD.shape[-1:], None, self.eps) * self.norm_HD)
        if self.rotation is not None:
            self.rotation.rotate_(qk_THD)


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
