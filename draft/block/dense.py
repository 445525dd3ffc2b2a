"""Blocks over a whole text without a cache: which rows read which, and attention by a mask.  For training and for checks.

A text's known tokens are one row each ("context"); each block has rows of its own.  Several texts run at once, each by itself.
The result is differentiable.

Shapes: N texts, R rows of each, Q queries among them, A blocks, D rows of each block that are not context rows, T context rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.inputs import LayerInputs
from specdec.attention.kinds import PLAIN, LayerKind, Scoring


class DenseBlockRows(NamedTuple):
    """Rows of some texts: context rows, and rows of blocks.

    positions_NR: int64.  block_R: int64, the block of each row; -1 for context.
    known_NR: int64, the last position whose context row this row reads; -1: it reads none.
    """

    positions_NR: Tensor
    block_R: Tensor
    known_NR: Tensor

    def visible(self, kind: LayerKind, causal: bool, queries: int, anchored: int = 0) -> Tensor:
        """[N, Q, R] bool: entry [n, q, k] says whether row q of text n reads its row k; the first `queries` rows alone.

        causal: whether rows of a block read none after them.
        anchored: the rows of a block, where a window is counted back from the block's first row; 0: from each row.
        """
        is_context_R, at_N1R = self.block_R < 0, self.positions_NR[:, None]
        block_Q1, known_NQ1, at_NQ1 = (x[..., :queries, None] for x in (self.block_R, self.known_NR, self.positions_NR))
        seen_NQR = is_context_R & (at_N1R <= known_NQ1)
        own_NQR = (self.block_R == block_Q1) & ~is_context_R
        if causal:
            own_NQR = own_NQR & (at_N1R <= at_NQ1)
        if kind.window is None:
            return seen_NQR | own_NQR
        first_NQ1 = torch.where(block_Q1 < 0, at_NQ1, known_NQ1 + anchored) if anchored else at_NQ1
        return (seen_NQR | own_NQR) & (at_N1R > first_NQ1 - kind.window)


class MaskedAttention:
    """Implements the models' AttentionFn.

    masks: for each layer, [N, Q, R] bool: which rows of its text each query reads.
    parts: how many rows of each text stand in each part of a pass; a part holds its rows of all texts, one text after another.
    """

    def __init__(self, masks: Sequence[Tensor], parts: Sequence[int]) -> None:
        self.masks, self.parts = masks, parts

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        assert scoring is PLAIN, "heads of blocks have plain scores"
        mask_NQR, (q, k, v) = self.masks[layer], inputs.dense()
        N, Q, _ = mask_NQR.shape
        assert rows_R is None and N * Q == len(q), "a mask has a row for each query"
        parts = [N * rows for rows in self.parts]
        k, v = (torch.cat([x.unflatten(0, (N, -1)) for x in each.split(parts)], dim=1) for each in (k, v))
        group = q.shape[1] // k.shape[2]  # repeated here, since torch's attention that keeps no scores in memory can't
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q.unflatten(0, (N, Q)), k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask_NQR[:, None])
        return out.transpose(1, 2).flatten(0, 1)
