"""P-EAGLE heads (arXiv 2602.01469): EAGLE-3 heads that draft several tokens in one pass.

A block is the last true pair and pairs that are not known yet.  Such a pair is the embedding of the mask token and a learned
feature, at the position after the pair before it; it reads all true pairs, and the pairs of its block up to itself.  This
module knows no tree, cache or verifier.

Shapes: N texts, T tokens of a text, P pairs, A blocks, S tokens drafted by each, H hidden, F target feature size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.config import SpecConfig
from specdec.draft.block.dense import DenseBlockRows
from specdec.draft.block.head import BlockHead
from specdec.draft.block.rounds.passes import BlockPass, PairPass
from specdec.draft.eagle.head import Eagle3Head
from specdec.draft.formats.parts import Part
from specdec.draft.formats.reading import PartNames
from specdec.draft.formats.spec import HeadSpec
from specdec.limits import MAX_PAUSE, MAX_STEPS
from specdec.models.making import new_weight


class PEagleHead(BlockHead, Eagle3Head):
    """mask_hidden_F: the feature of pairs that are not known; norms and `fc` treat it as a true one."""

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        super().__init__(config, max_positions + 2 * MAX_STEPS + MAX_PAUSE)
        self.mask_hidden_F = new_weight(config.feature_size)

    def parts(self, names: PartNames) -> Iterator[Part]:
        yield from super().parts(names)
        yield "mask_hidden", self.mask_hidden_F

    @property
    def returns_normed(self) -> bool:
        return True  # logits alone read the output

    def mask_feature(self) -> Tensor:
        """[1, H]: the fused feature of a pair that is not known."""
        return self.fuse(self.mask_hidden_F[None])

    def drafts(self, features_NTF: Tensor, ids_NT: Tensor, anchors_NA: Tensor, steps: int) -> Tensor:
        (N, A), P, D, device = anchors_NA.shape, ids_NT.shape[1] - 1, steps - 1, ids_NT.device
        true_P, unknown = torch.arange(P, dtype=torch.int64, device=device), A * D
        last_NR = (anchors_NA - 1).repeat_interleave(D, 1)
        block_R = torch.arange(A, dtype=torch.int64, device=device).repeat_interleave(D)
        rows = DenseBlockRows(
            torch.cat(
                (true_P.expand(N, P), last_NR + torch.arange(1, steps, dtype=torch.int64, device=device).repeat(A)), dim=1
            ),
            torch.cat((torch.full_like(true_P, -1), block_R)),
            torch.cat((true_P.expand(N, P), last_NR), dim=1),
        )
        ids = torch.cat((ids_NT[:, 1:], ids_NT.new_full((N, unknown), self.block.mask_id)), dim=1)
        fused_NPH = self.fuse(features_NTF[:, :P].flatten(0, 1)).unflatten(0, (N, P))
        fused = torch.cat((fused_NPH, self.mask_feature().expand(N, unknown, -1)), dim=1)
        attn = self.masked(rows, P + unknown, (P + unknown,))
        hidden = self(ids.flatten(), fused.flatten(0, 1), rows.positions_NR.flatten(), attn).unflatten(0, (N, -1))
        first_NA1H = hidden.take_along_dim(anchors_NA[..., None] - 1, dim=1)[:, :, None]
        return torch.cat((first_NA1H, hidden[:, P:].unflatten(1, (A, D))), dim=2)

    def make_pass(self, backend: Backend, cache: KVCache, steps: int) -> BlockPass:
        return PairPass(self, backend, cache, steps)

    def doubt(self, spec: SpecConfig) -> str:
        if not self.block.size or spec.max_steps <= self.block.size:
            return super().doubt(spec)
        return (
            f"num_steps={spec.num_steps} asks for more tokens of a pass than the {self.block.size} that this P-EAGLE head "
            f"was trained to draft; those after them are hardly ever right; nearest setting that does not: "
            f"{f'num_draft_tokens={self.block.size + 1}' if spec.is_auto else f'num_steps={self.block.size}'}"
        )
