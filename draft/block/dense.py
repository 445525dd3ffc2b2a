"""Blocks over a whole text without a cache: which rows read which, and attention by a mask.  For training and for checks.

A text's known tokens are one row each ("context"); each block has rows of its own.  The result is differentiable.

Shapes: R rows, N queries among them, A blocks, D rows of each block that are not context rows, T context rows, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.inputs import LayerInputs
from specdec.attention.kinds import PLAIN, LayerKind, Scoring


class BlockRows(NamedTuple):
    """Rows of one text: context rows, and rows of blocks.

    positions_R: int64.  block_R: int64, the block of each row; -1 for context.
    known_R: int64, the last position whose context row this row reads; -1: it reads none.
    """

    positions_R: Tensor
    block_R: Tensor
    known_R: Tensor

    def visible(self, kind: LayerKind, causal: bool, anchored: int = 0) -> Tensor:
        """[R, R] bool: entry [q, k] says whether row q reads row k.

        causal: whether rows of a block read none after them.
        anchored: the rows of a block, where a window is counted back from the block's first row; 0: from each row.
        """
        is_context_R = self.block_R < 0
        first_R1 = self.positions_R[:, None]
        if anchored:
            first_R1 = torch.where(is_context_R[:, None], first_R1, self.known_R[:, None] + anchored)
        seen_RR = is_context_R & (self.positions_R <= self.known_R[:, None])
        own_RR = (self.block_R == self.block_R[:, None]) & ~is_context_R
        if causal:
            own_RR = own_RR & (self.positions_R <= self.positions_R[:, None])
        if kind.window is None:
            return seen_RR | own_RR
        return (seen_RR | own_RR) & (self.positions_R > first_R1 - kind.window)


class MaskedAttention:
    """Implements the models' AttentionFn.  masks: for each layer, [R, R] bool: which rows each row reads."""

    def __init__(self, masks: Sequence[Tensor]) -> None:
        self.masks = masks

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        assert scoring is PLAIN, "heads of blocks have plain scores"
        mask_NR, (q, k, v) = self.masks[layer], inputs.dense()
        if rows_R is not None:
            mask_NR, q = mask_NR.index_select(0, rows_R), q.index_select(0, rows_R)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask_NR, enable_gqa=True)
        return out[0].transpose(0, 1)
