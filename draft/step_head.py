"""What the draft worker needs of a head that drafts one level of a tree in each of its passes: EAGLE heads, MTP layers.

A head reads pairs.  Pair i consists of the embedding of token i + 1 and the feature of token i, and predicts token i + 2.  Its
hidden output takes the place of the next pair's feature.  This module knows no tree, cache or verifier.

Shapes: T pairs, H hidden, F the target's features of one token, concatenated, R rows asked for, V draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from specdec.attention.inputs import AttentionFn
from specdec.config import SpecConfig
from specdec.draft.head import Head
from specdec.limits import MAX_PAUSE


class StepHead(Head):
    """hidden_size: H."""

    hidden_size: int

    def slots(self, spec: SpecConfig) -> int:
        branches = spec.topk * (spec.max_steps - 1) if spec.topk > 1 else 0
        return max(branches, super().slots(spec), MAX_PAUSE if spec.is_auto else 0)

    def passes(self, spec: SpecConfig) -> int:
        return spec.max_steps

    @abstractmethod
    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        """One step over pairs: hidden [T, H], which is the next pair's feature and the input of `logits`.

        ids_T: int64, each pair's token.
        hidden_TH: each pair's feature, fused.
        positions_T: int64 rotary positions.
        rows_R: int64.  If given, only these rows' hidden states are returned: [R, H].
        """

    def begin(self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor) -> Tensor:
        """`forward` over pairs of prompts, among which a text's first pair may be."""
        return self(ids_T, hidden_TH, positions_T, attn, rows_R)

    def level(self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn) -> tuple[Tensor, Tensor]:
        """`forward`, and its result's `logits`, for the branches of one level of a draft."""
        next_TH = self(ids_T, hidden_TH, positions_T, attn)
        return next_TH, self.logits(next_TH)
