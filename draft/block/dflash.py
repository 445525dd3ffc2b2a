"""DFlash and DSpark heads: a block of rows over the target's features of the text before it.

The features of each known token are fused once; every layer makes keys and values of the same fused feature, and nothing else
becomes of it.  A block is the last known token and mask tokens, at the positions from that token on.  Its rows read the
context before the block and, by the layer's rule, the rows of the block.  This module knows no tree, cache or verifier.

Shapes: T tokens of a text, C context rows, R = A * B rows of A blocks of B rows, S tokens drafted by each, H hidden, F the
target's features of one token, W draft vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.config import SpecConfig
from specdec.draft.block.dense import BlockRows, MaskedAttention
from specdec.draft.block.markov import Markov
from specdec.draft.drafter import Drafter, Place
from specdec.draft.formats.spec import BlockSpec, HeadSpec
from specdec.draft.head import DraftHead
from specdec.limits import MAX_PAUSE
from specdec.models.causal_lm import DecoderLayer
from specdec.models.layers import RMSNorm
from specdec.models.linear import Linear
from specdec.models.target import Target
from specdec.ops.index import arange


class DFlashHead(DraftHead):
    """The language-model head and the embeddings are the target's, as a rule."""

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        block, model = config.block, config.model
        assert block is not None and block.size
        super().__init__(config, max_positions + block.size + MAX_PAUSE)
        self.block: BlockSpec = block
        self.fc = Linear(config.feature_size, model.hidden_size)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(model) for _ in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)

    def fuse(self, features_TF: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features_TF))

    def forward(self, ids_R: Tensor, context_CH: Tensor, positions: Tensor, attn: AttentionFn) -> Tensor:
        """[R, H]: the blocks' rows after the final norm.

        ids_R: int64, the blocks' tokens.  context_CH: fused features, of which keys and values are kept.
        positions: [R + C] int64, of the blocks' rows, and then of the context.
        """
        R, rotation = len(ids_R), self.rotary.at(positions)
        rows_R, layers = arange(R, ids_R.device), [cast(DecoderLayer, layer) for layer in self.layers]
        x = F.embedding(ids_R, self.embed_tokens.weight)
        normed = layers[0].input_layernorm(x)
        for index, layer in enumerate(layers):
            attended = layer.self_attn(torch.cat((normed, context_CH)), rotation, attn, index, rows_R)
            x, normed = layer.post_attention_layernorm.add(x, attended)
            next_norm = layers[index + 1].input_layernorm if index + 1 < len(layers) else self.norm
            x, normed = next_norm.add(x, layer.mlp(normed))
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def block_ids(self, anchors_A: Tensor) -> Tensor:
        """[A, B] int64: the last known token, then mask tokens."""
        ids_AB = anchors_A.new_full((len(anchors_A), self.block.size), self.block.mask_id)
        ids_AB[:, 0] = anchors_A
        return ids_AB

    def drafts(self, features_TF: Tensor, ids_T: Tensor, anchors_A: Tensor, steps: int) -> Tensor:
        """[A, S, H]: what `logits` reads, for the S tokens after each anchor, from a whole text at once, without a cache.

        features_TF: the target's features of the text's tokens.  ids_T: int64.
        anchors_A: int64, positions of the last known tokens; features are known of the tokens before them.
        """
        A, B, T, device = len(anchors_A), self.block.size, len(ids_T), ids_T.device
        at_AB = anchors_A[:, None] + torch.arange(B, device=device)
        blocks_AB = torch.arange(A, device=device)[:, None].expand(A, B)
        at_T = torch.arange(T, device=device)
        none_T = torch.full_like(at_T, -1)
        rows = BlockRows(
            torch.cat((at_AB.flatten(), at_T)),
            torch.cat((blocks_AB.flatten(), none_T)),
            torch.cat(((anchors_A[:, None] - 1).expand(A, B).flatten(), none_T)),
        )
        anchored = B if self.block.anchored_windows else 0
        kinds = list(zip(self.config.model.layer_kinds, self.block.causal, strict=True))
        masks: dict[Any, Tensor] = {kind: rows.visible(*kind, anchored)[: A * B] for kind in set(kinds)}
        attn = MaskedAttention([masks[kind] for kind in kinds])
        ids_AB = self.block_ids(ids_T[anchors_A])
        hidden = self(ids_AB.flatten(), self.fuse(features_TF), rows.positions_R, attn).view(A, B, -1)
        first = int(self.block.skips_anchor)
        return hidden[:, first : first + steps]

    def check(self, spec: SpecConfig) -> None:
        super().check(spec)
        most = self.block.most_steps
        if most is not None and spec.max_steps > most:
            raise ValueError(
                f"num_steps must be at most {most}, the tokens that this head drafts in a pass, got {spec.num_steps}; "
                f"nearest setting that works: num_steps={most}"
            )

    def slots(self, spec: SpecConfig) -> int:
        return self.block.slots(spec)

    def smoke(self, target: Target, ids_T: Tensor) -> str:
        from specdec.draft.block.smoke import BlockLook  # which knows heads, too

        return BlockLook().complaint(self, target, ids_T)

    def passes(self, spec: SpecConfig) -> int:
        return 1

    def worker(self, place: Place) -> Drafter:
        from specdec.draft.block.worker import BlockWorker  # which knows heads, too

        return BlockWorker(self, place)


class DSparkHead(DFlashHead):
    """A DFlash head with a Markov head, and perhaps with an estimate that the next token is accepted."""

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        super().__init__(config, max_positions)
        model, r = config.model, self.block.markov_rank
        self.markov = Markov(self.block, model.hidden_size, model.vocab_size, config.draft_vocab_size, model.shard)
        self.confidence = None
        if self.block.confidence != "none":
            width = model.hidden_size + (r if self.block.confidence == "markov" else 0)
            self.confidence = Linear(width, 1, bias=True)

    def walk(self, hidden_ASH: Tensor, before_AS: Tensor) -> Tensor:
        """[A, S, W]: logits along known texts, for training and checks.

        before_AS: int64 ids of the target's vocabulary: the token before each of the tokens that are drafted.
        """
        state, rows = None, []
        embedded_ASr = self.markov.embed(before_AS)
        for hidden_AH, embedded_Ar in zip(hidden_ASH.unbind(1), embedded_ASr.unbind(1), strict=True):
            row_Ar, state = self.markov.step(hidden_AH, embedded_Ar, state)
            rows.append(row_Ar)
        return self.logits(hidden_ASH) + self.markov.w2(torch.stack(rows, dim=1))

    def confidences(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[...]: logits of the estimates.  hidden: [..., H].  embedded: [..., r], the tokens before (`Markov.embed`)."""
        assert self.confidence is not None
        if self.block.confidence == "markov":
            hidden = torch.cat((hidden, embedded), dim=-1)
        return self.confidence(hidden)[..., 0]
