"""How heads of one pass are looked at when they are loaded (draft/smoke.py): the first tokens of blocks all along the text.

Shapes: T tokens, A blocks, S tokens of each, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.draft.block.head import BlockHead
from specdec.draft.broken import FilesLook
from specdec.draft.smoke import (
    DRAFTS,
    Misreading,
    TargetPass,
    is_right,
    misread_config,
    misread_layers,
    misread_residual,
    respecified,
    variant,
)
from specdec.models.target import Target


class BlockLook(FilesLook):
    """A chain is the first tokens of the block that begins at its place."""

    def drafts(self, head: BlockHead) -> int:
        size = head.block.size  # one less, so that it is the same whether the first row drafts or not
        return min(DRAFTS, max(1, size - 1)) if size else DRAFTS

    def rights(self, seen: TargetPass, head: BlockHead, layers: tuple[int, ...]) -> Iterator[Tensor]:
        S, device = self.drafts(head), seen.ids_T.device
        anchors_A = torch.arange(1, len(seen.ids_T) - S + 1, dtype=torch.int64, device=device)
        after_AS = anchors_A[:, None] + torch.arange(S, dtype=torch.int64, device=device)
        (hidden_ASH,) = head.drafts(seen.features(layers)[None], seen.ids_T[None], anchors_A[None], S)
        logits_ASV = head.walk(hidden_ASH, seen.ids_T[after_AS])
        yield from is_right(head, logits_ASV, seen.chosen_P[after_AS - 1]).unbind(1)

    def misreadings(self, head: Any, target: Target) -> Iterator[Misreading]:
        block = head.block
        yield from misread_layers(head, target)
        if head.config.reads_pairs:
            yield from misread_residual(head)
        else:
            if block.size > 1:
                name = f"rows that draft the token of the place {'after it' if block.skips_anchor else 'of its own'}"
                other = respecified(head, block=replace(block, skips_anchor=not block.skips_anchor))
                yield Misreading(f"{name} (sample_from_anchor)", other)
            causal = tuple(not each for each in block.causal)
            yield Misreading("causal layers and others exchanged", respecified(head, block=replace(block, causal=causal)))
            yield Misreading("hidden_norm and norm exchanged", variant(head, hidden_norm=head.norm, norm=head.hidden_norm))
        yield from misread_config(head, target)
