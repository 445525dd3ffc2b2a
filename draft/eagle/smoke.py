"""How EAGLE heads are looked at when they are loaded (draft/smoke.py): chains of drafts from the target's features.

Shapes: P pairs, F features of one token, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.attention.eager.dense import DenseAttention
from specdec.draft.broken import FilesLook
from specdec.draft.eagle.head import EagleHead
from specdec.draft.head import StepHead
from specdec.draft.smoke import (
    HeadLook,
    Misreading,
    TargetPass,
    is_right,
    misread_config,
    misread_feature,
    misread_layers,
    misread_residual,
    respecified,
)
from specdec.models.target import Target


class StepLook(HeadLook):
    """Of heads that draft a level a pass.

    Each pass goes along the whole text, and reads its own outputs one place before in place of the target's features.  So a
    chain's later drafts also read pairs before the chain as the head would have drafted them, and are right a little less often
    than where only the chain's own pairs are the head's.
    """

    def rights(self, seen: TargetPass, head: StepHead, layers: tuple[int, ...]) -> Iterator[Tensor]:
        P, S = len(seen.chosen_P), self.drafts(head)
        next_P, positions_P = seen.ids_T[1:], torch.arange(P, dtype=torch.int64, device=seen.ids_T.device)
        hidden_PH = head.fuse(seen.features(layers)[:P])
        for step in range(S):
            hidden_PH = head(next_P, hidden_PH, positions_P, DenseAttention(head.needs.models[0].layer_kinds))
            right_P = is_right(head, head.logits(hidden_PH), seen.chosen_P)
            yield right_P[step : P - S + 1 + step]  # by the place at which the chain begins
            hidden_PH = torch.cat((hidden_PH[:1], hidden_PH[:-1]))


class EagleLook(StepLook, FilesLook):
    """Of EAGLE heads."""

    def misreadings(self, head: EagleHead, target: Target) -> Iterator[Misreading]:
        spec = head.config
        if spec.aux_layers:
            yield from misread_layers(head, target)
            yield from misread_residual(head)
            name = f"the output recycled {'before' if spec.recycles_normed else 'after'} the final norm (norm_output)"
            yield Misreading(name, respecified(head, recycles_normed=not spec.recycles_normed))
            name = f"logits of the {'raw' if spec.norms_logits else 'normed'} output (norm_output)"
            yield Misreading(name, respecified(head, norms_logits=not spec.norms_logits, recycles_normed=False))
        else:  # EAGLE-1
            yield from misread_feature(head, target)
        yield from misread_config(head, target)
