"""DFlash and DSpark heads: a block of rows over the target's features of the text before it.

The features of each known token are fused once; every layer makes keys and values of the same fused feature, and nothing else
becomes of it.  A block is the last known token and mask tokens, at the positions from that token on.  Its rows read the
context before the block and, by the layer's rule, the rows of the block.  This module knows no tree, cache or verifier.

Shapes: N texts, T tokens of a text, C context rows, R rows of all blocks: A blocks of each text, B rows of each block, S tokens
drafted by each, H hidden, F the target's features of one token, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.attention.caches.planes import HeadsView
from specdec.attention.inputs import AttentionFn, DenseHeads, HeadInputs, LayerCall
from specdec.config import SpecConfig
from specdec.draft.block.dense import BlockRows, MaskedAttention
from specdec.draft.block.markov import Markov
from specdec.draft.drafter import Drafter, DrafterContext, Impression
from specdec.draft.formats.spec import BlockSpec, HeadSpec
from specdec.draft.head import DraftHead
from specdec.limits import MAX_PAUSE
from specdec.models.causal_lm import DecoderLayer
from specdec.models.layers import RMSNorm, SelfAttention
from specdec.models.linear import Linear
from specdec.models.target import Target
from specdec.ops.products.terms import Terms
from specdec.ops.rope import HeadPrep, Rotation


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
        layers = [cast(DecoderLayer, layer) for layer in self.layers]
        x, normed_TH = layers[0].input_layernorm.embed(ids_R, self.embed_tokens.weight, context_CH)
        for index, layer in enumerate(layers):
            attended = _attended(layer.self_attn, normed_TH, rotation, attn, index, R)
            x, normed = layer.post_attention_layernorm.add(x, attended)
            is_last = index + 1 == len(layers)
            next_norm, below = (self.norm, None) if is_last else (layers[index + 1].input_layernorm, context_CH)
            x, normed_TH = next_norm.add(x, layer.mlp(normed, terms=True), below_CH=below)
        return normed_TH

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def block_ids(self, anchors: Tensor) -> Tensor:
        """[..., B] int64: the last known token, then mask tokens."""
        return F.pad(anchors[..., None], (0, self.block.size - 1), value=self.block.mask_id)

    def drafts(self, features_NTF: Tensor, ids_NT: Tensor, anchors_NA: Tensor, steps: int) -> Tensor:
        """[N, A, S, H]: what `logits` reads, for the S tokens after each anchor, from whole texts at once, without a cache.

        features_NTF: the target's features of the texts' tokens.  ids_NT: int64.
        anchors_NA: int64, positions of the last known tokens; features are known of the tokens before them.
        """
        (N, A), B, T, device = anchors_NA.shape, self.block.size, ids_NT.shape[1], ids_NT.device
        at_NR = (anchors_NA[..., None] + torch.arange(B, dtype=torch.int64, device=device)).flatten(1)
        block_R = torch.arange(A, dtype=torch.int64, device=device).repeat_interleave(B)
        at_NT = torch.arange(T, dtype=torch.int64, device=device).expand(N, T)
        none_NT = torch.full_like(at_NT, -1)
        rows = BlockRows(
            torch.cat((at_NR, at_NT), dim=1),
            torch.cat((block_R, none_NT[0])),
            torch.cat(((anchors_NA - 1).repeat_interleave(B, 1), none_NT), dim=1),
        )
        anchored = B if self.block.anchored_windows else 0
        kinds = list(zip(self.config.model.layer_kinds, self.block.causal, strict=True))
        masks: dict[Any, Tensor] = {kind: rows.visible(*kind, A * B, anchored) for kind in set(kinds)}
        attn = MaskedAttention([masks[kind] for kind in kinds], parts=(A * B, T))
        ids_NAB = self.block_ids(ids_NT.gather(1, anchors_NA))
        positions = torch.cat((at_NR.flatten(), at_NT.flatten()))
        hidden = self(ids_NAB.flatten(), self.fuse(features_NTF.flatten(0, 1)), positions, attn).view(N, A, B, -1)
        first = int(self.block.skips_anchor)
        return hidden[:, :, first : first + steps]

    def default_shape(self) -> SpecConfig:
        return self.block.default_shape()

    def check(self, spec: SpecConfig) -> None:
        super().check(spec)
        most = self.block.most_steps
        if most is not None and spec.max_steps > most:
            raise ValueError(
                f"num_steps must be at most {most}, the tokens that this head drafts in a pass, got {spec.num_steps}; nearest "
                f"setting that works: {f'num_draft_tokens={most + 1}' if spec.is_auto else f'num_steps={most}'}"
            )

    def slots(self, spec: SpecConfig) -> int:
        return self.block.slots(spec)

    def smoke(self, target: Target, ids_T: Tensor) -> Impression:
        from specdec.draft.block.smoke import BlockLook  # which knows heads, too

        return BlockLook().impression(self, target, ids_T)

    def passes(self, spec: SpecConfig) -> int:
        return 1

    def worker(self, context: DrafterContext) -> Drafter:
        from specdec.draft.block.rounds.worker import BlockWorker  # which knows heads, too

        return BlockWorker(self, context)


def _attended(
    layer: SelfAttention, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, index: int, rows: int
) -> Tensor | Terms:
    """[R, H]: the attention of the first `rows` of T rows, of all of which keys and values are kept."""
    norm = layer.qk_norm
    prep = HeadPrep(rotation, layer.num_kv_heads, norm.weight if norm else None, norm.eps if norm else 0.0)
    inputs = FirstRows(layer.qkv_proj(x_TH).unflatten(-1, (-1, layer.head_dim)), prep, rows)
    return layer.o_proj(attn(index, inputs).flatten(1), terms=True)


@dataclass
class FirstRows(HeadInputs):
    """Ordinary heads, of which the first `rows` rows alone attend."""

    rows: int

    def paged(self, call: LayerCall) -> Tensor:
        q_TQD = call.backend.store(cast(HeadsView, call.view), self.qkv_TXD, call.slots_T, self.prep)
        return call.attend(q_TQD[: self.rows])

    def dense(self) -> DenseHeads:
        heads = super().dense()
        return heads._replace(q_TQD=heads.q_TQD[: self.rows])


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

    def walk(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[..., S, W]: logits along known texts, for training and checks.  hidden: [..., S, H].

        before: [..., S] int64 ids of the target's vocabulary: the token before each of the tokens that are drafted.
        """
        state, rows = None, []
        for own, embedded in zip(hidden.unbind(-2), self.markov.embed(before).unbind(-2), strict=True):
            row, state = self.markov.step(own, embedded, state)
            rows.append(row)
        return self.logits(hidden) + self.markov.w2(torch.stack(rows, dim=-2))

    def confidences(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[...]: logits of the estimates.  hidden: [..., H].  embedded: [..., r], the tokens before (`Markov.embed`)."""
        assert self.confidence is not None
        if self.block.confidence == "markov":
            hidden = torch.cat((hidden, embedded), dim=-1)
        return self.confidence(hidden)[..., 0]
