"""How EAGLE heads are looked at when they are loaded (draft/smoke.py): two steps from the target's features.

Shapes: P pairs, F features of one token, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from specdec.attention.eager.dense import DenseAttention
from specdec.draft.eagle.head import Eagle3Head, EagleHead
from specdec.draft.smoke import (
    Look,
    Misreading,
    Score,
    Seen,
    logp_of,
    misread_config,
    misread_layers,
    misread_residual,
    variant,
)
from specdec.draft.step_head import StepHead
from specdec.models.target import Target


class StepLook(Look):
    """Of heads that draft a level a pass.

    A place's score is that of the step from the target's true features, and of the step from the head's own output one place
    before.
    """

    def score(self, seen: Seen, head: StepHead, layers: tuple[int, ...]) -> Score:
        P = len(seen.chosen_P)
        next_P, positions_P = seen.ids_T[1:], torch.arange(P, dtype=torch.int64, device=seen.ids_T.device)
        hidden_PH, agreement = head.fuse(seen.features(layers)[:P]), 0.0
        total_P = torch.zeros(P, dtype=torch.float32, device=seen.ids_T.device)
        for step in range(2):
            hidden_PH = head(next_P, hidden_PH, positions_P, DenseAttention(head.needs.models[0].layer_kinds))
            own_P, right_P = logp_of(head, head.logits(hidden_PH), seen.chosen_P)
            total_P = total_P + own_P.where(positions_P >= step, 0.0)
            if not step:
                agreement = float(right_P.float().mean())
            hidden_PH = torch.cat((hidden_PH[:1], hidden_PH[:-1]))
        return Score(agreement, total_P)


class EagleLook(StepLook):
    """Of EAGLE heads."""

    def misreadings(self, head: EagleHead, target: Target) -> Iterator[Misreading]:
        spec, layers = head.config, head.config.aux_layers
        if not isinstance(head, Eagle3Head):
            if not target.config.features_refusal:
                yield "the feature taken before the target's final norm", head, (target.config.num_layers - 1,)
            return
        yield from misread_layers(head, target)
        yield from misread_residual(head)
        yield (
            f"the output recycled {'before' if spec.recycles_normed else 'after'} the final norm (norm_output)",
            variant(head, replace(spec, recycles_normed=not spec.recycles_normed)),
            layers,
        )
        yield (
            f"logits of the {'raw' if spec.norms_logits else 'normed'} output (norm_output)",
            variant(head, replace(spec, norms_logits=not spec.norms_logits, recycles_normed=False)),
            layers,
        )
        yield from misread_config(head, target)
