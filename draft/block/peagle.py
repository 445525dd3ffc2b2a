"""P-EAGLE heads (arXiv 2602.01469): EAGLE-3 heads that draft several tokens in one pass.

A block is the last true pair and pairs that are not known yet.  Such a pair is the embedding of the mask token and a learned
feature, at the position after the pair before it; it reads all true pairs, and the pairs of its block up to itself.  This
module knows no tree, cache or verifier.

Shapes: T tokens of a text, P pairs, A blocks, S tokens drafted by each, H hidden, F the target's features of one token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec.config import SpecConfig
from specdec.draft.block.dense import BlockRows, MaskedAttention
from specdec.draft.drafter import Drafter, Place
from specdec.draft.eagle.head import Eagle3Head
from specdec.draft.formats.spec import BlockSpec, HeadSpec
from specdec.limits import MAX_PAUSE, MAX_STEPS
from specdec.models.target import Target


class PEagleHead(Eagle3Head):
    """mask_hidden_F: the feature of pairs that are not known; norms and `fc` treat it as a true one."""

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        block = config.block
        assert block is not None
        super().__init__(config, max_positions + 2 * MAX_STEPS + MAX_PAUSE)
        self.block: BlockSpec = block
        self.mask_hidden_F = nn.Parameter(torch.empty(config.feature_size))

    def mask_feature(self) -> Tensor:
        """[1, H]: the fused feature of a pair that is not known."""
        return self.fuse(self.mask_hidden_F[None])

    def drafts(self, features_TF: Tensor, ids_T: Tensor, anchors_A: Tensor, steps: int) -> Tensor:
        """[A, S, H]: what `logits` reads, for the S tokens after each anchor, from a whole text at once, without a cache.

        features_TF: the target's features of the text's tokens.  ids_T: int64.
        anchors_A: int64, positions from 1 on of the last known tokens; features are known of the tokens before them.
        """
        P, A, device = len(ids_T) - 1, len(anchors_A), ids_T.device
        depths_D = torch.arange(1, steps, device=device)
        true_P = torch.arange(P, device=device)
        last_AD = (anchors_A[:, None] - 1).expand(A, steps - 1)
        blocks_AD = torch.arange(A, device=device)[:, None].expand(A, steps - 1)
        rows = BlockRows(
            torch.cat((true_P, (last_AD + depths_D).flatten())),
            torch.cat((torch.full_like(true_P, -1), blocks_AD.flatten())),
            torch.cat((true_P, last_AD.flatten())),
        )
        unknown = A * (steps - 1)
        ids = torch.cat((ids_T[1:], ids_T.new_full((unknown,), self.block.mask_id)))
        fused = torch.cat((self.fuse(features_TF[:P]), self.mask_feature().expand(unknown, -1)))
        kinds = self.config.model.layer_kinds
        masks: dict[Any, Tensor] = {kind: rows.visible(kind, True) for kind in set(kinds)}
        hidden = self(ids, fused, rows.positions_R, MaskedAttention([masks[kind] for kind in kinds]))
        return torch.cat((hidden[anchors_A - 1][:, None], hidden[P:].view(A, steps - 1, hidden.shape[1])), dim=1)

    def slots(self, spec: SpecConfig) -> int:
        return self.block.slots(spec)

    def worker(self, place: Place) -> Drafter:  # type: ignore[override]
        from specdec.draft.block.worker import BlockWorker  # which knows heads, too

        return BlockWorker(self, place)

    def smoke(self, target: Target, ids_T: Tensor) -> str:
        from specdec.draft.block.smoke import BlockLook  # which knows heads, too

        return BlockLook().complaint(self, target, ids_T)

    def passes(self, spec: SpecConfig) -> int:
        return 1
