"""How heads of one pass are looked at when they are loaded (draft/smoke.py): the first tokens of blocks all along the text.

Shapes: T tokens, A blocks, S tokens of each, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.draft.block.dflash import DFlashHead, DSparkHead
from specdec.draft.block.peagle import PEagleHead
from specdec.draft.formats.spec import BlockSpec
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
from specdec.models.target import Target

STEPS = 2  # tokens of each block


class BlockLook(Look):
    """A place's score is that of the first tokens of a block that begins there."""

    def score(self, seen: Seen, head: PEagleHead | DFlashHead, layers: tuple[int, ...]) -> Score:
        last = len(seen.ids_T) - STEPS
        anchors_A = torch.arange(1, last + 1, dtype=torch.int64, device=seen.ids_T.device)
        steps = min(STEPS, head.block.most_steps or STEPS)
        after_AS = anchors_A[:, None] + torch.arange(steps, dtype=torch.int64, device=anchors_A.device)
        (hidden_ASH,) = head.drafts(seen.features(layers)[None], seen.ids_T[None], anchors_A[None], steps)
        own_AS, right_AS = logp_of(head, logits_of(head, hidden_ASH, seen.ids_T[after_AS]), seen.chosen_P[after_AS - 1])
        return Score(float(right_AS[:, 0].float().mean()), own_AS.sum(1))

    def misreadings(self, head: PEagleHead | DFlashHead, target: Target) -> Iterator[Misreading]:
        layers = head.config.aux_layers
        yield from misread_layers(head, target)
        if isinstance(head, PEagleHead):
            yield from misread_residual(head)
        else:
            block = head.block
            if block.size > STEPS + 1:
                place = "after it" if block.skips_anchor else "of its own"
                yield (
                    f"rows that draft the token of the place {place} (sample_from_anchor)",
                    of_block(head, replace(block, skips_anchor=not block.skips_anchor)),
                    layers,
                )
            causal = tuple(not each for each in block.causal)
            yield "causal layers and others exchanged", of_block(head, replace(block, causal=causal)), layers
            yield (
                "hidden_norm and norm exchanged",
                variant(head, head.config, hidden_norm=head.norm, norm=head.hidden_norm),
                layers,
            )
        yield from misread_config(head, target)


def logits_of(head: PEagleHead | DFlashHead, hidden_ASH: Tensor, before_AS: Tensor) -> Tensor:
    """[A, S, V].  before_AS: int64, the text's token before each one that is drafted."""
    return head.walk(hidden_ASH, before_AS) if isinstance(head, DSparkHead) else head.logits(hidden_ASH)


def of_block(head: DFlashHead, block: BlockSpec) -> Any:
    """The head over another block."""
    other = variant(head, replace(head.config, block=block))
    other.block = block
    return other
