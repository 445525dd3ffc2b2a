"""How assistants are looked at when they are loaded (draft/smoke.py): chains of drafts from every place of a text.

All drafts of a chain read the keys up to the place where it begins, as in a round.

Shapes: P places, C chains, F features of one token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.attention.eager.dense import KeptKeys
from specdec.draft.assistant.head import Assistant
from specdec.draft.smoke import HeadLook, Misreading, TargetPass, is_right, misread_feature, variant
from specdec.models.linear import Linear
from specdec.models.target import Target


class AssistantLook(HeadLook):
    """Of assistants."""

    def rights(self, seen: TargetPass, head: Assistant, layers: tuple[int, ...]) -> Iterator[Tensor]:
        P, S = len(seen.chosen_P), self.drafts(head)
        places_T = torch.arange(1, len(seen.ids_T) + 1, dtype=torch.int64, device=seen.ids_T.device)
        attn = KeptKeys(seen.kinds, seen.kept)
        hidden_TF, count = seen.features(layers), P - S + 1
        for step in range(S):
            ids_T = seen.ids_T.roll(-1 - step)  # of the last places, which are no chain's, any
            z_TH = head(ids_T, hidden_TF, places_T, attn)
            yield is_right(head, head.logits(z_TH[:count]), seen.chosen_P[step : count + step])
            hidden_TF = head.recycled(z_TH)

    def misreadings(self, head: Assistant, target: Target) -> Iterator[Misreading]:
        weight = head.pre_projection.by_head(1)[0]
        halves = nn.Parameter(weight.roll(head.feature_size, dims=1), requires_grad=False)
        yield Misreading("the hidden state read before the embedding", variant(head, pre_projection=Linear.of(halves)))
        unscaled = variant(head)
        unscaled.embedding_multiplier = 1.0
        yield Misreading("embeddings read without the target's multiplier", unscaled)
        yield from misread_feature(head, target)
