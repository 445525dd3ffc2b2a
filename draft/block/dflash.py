"""DFlash and DSpark heads: a block of rows over the target's features of the text before it.

The features of each known token are fused once; every layer makes keys and values of the same fused feature, and nothing else
becomes of it.  A block is the last known token and mask tokens, at the positions from that token on.  Its rows read the
context before the block and, by the layer's rule, the rows of the block.  This module knows no tree, cache or verifier.

Shapes: N texts, T tokens of a text, C context rows, R rows of all blocks: A blocks of each text, B rows of each block, S tokens
drafted by each, H hidden, F the target's features of one token, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import HeadsView
from specdec.attention.inputs import AttentionFn, DenseHeads, HeadInputs, LayerCall
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.block.dense import DenseBlockRows
from specdec.draft.block.head import BlockHead
from specdec.draft.block.markov import Markov
from specdec.draft.block.rounds.passes import BlockPass, ContextPass
from specdec.draft.block.rounds.trees import STOP_BELOW, MarkovWalk
from specdec.draft.formats.parts import Part, layer_parts
from specdec.draft.formats.reading import PartNames
from specdec.draft.formats.spec import HeadSpec
from specdec.limits import MAX_PAUSE
from specdec.models.causal_lm import DecoderLayer
from specdec.models.layers import RMSNorm, SelfAttention
from specdec.models.linear import Linear
from specdec.ops.noise.gumbel import Noise
from specdec.ops.products.partials import Partials
from specdec.ops.rope import HeadPrep, Rotation


class DFlashHead(BlockHead):
    """The language-model head and the embeddings are the target's, as a rule."""

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        block, model = config.block, config.model
        assert block is not None and block.size
        super().__init__(config, max_positions + block.size + MAX_PAUSE)
        self.fc = Linear(config.feature_size, model.hidden_size)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(model) for _ in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)

    def parts(self, names: PartNames) -> Iterator[Part]:
        yield names.fc, self.fc
        yield "hidden_norm", self.hidden_norm
        for layer, name in zip(self.layers, (names.first, *names.layers), strict=True):
            yield from layer_parts(layer, name)
        yield "norm", self.norm

    def fuse(self, features_TF: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features_TF))

    def forward(self, ids_R: Tensor, context_CH: Tensor, positions: Tensor, attn: AttentionFn) -> Tensor:
        """[R, H]: the blocks' rows after the final norm.

        ids_R: int64, the blocks' tokens.  context_CH: fused features, of which keys and values are kept.
        positions: [R + C] int64, of the blocks' rows, and then of the context.
        """
        R, rotation = len(ids_R), self.rotary.at(positions)
        layers = [cast(DecoderLayer, layer) for layer in self.layers]
        x, normed_TH = self.embedded(ids_R, context_CH)
        for index, layer in enumerate(layers):
            found = attended(layer.self_attn, normed_TH, rotation, attn, index, R)
            x, normed = layer.post_attention_layernorm.add(x, found)
            is_last = index + 1 == len(layers)
            next_norm, below = (self.norm, None) if is_last else (layers[index + 1].input_layernorm, context_CH)
            x, normed_TH = next_norm.add(x, layer.mlp(normed, partials=True), below_CH=below)
        return normed_TH

    def embedded(self, ids_R: Tensor, context_CH: Tensor | None) -> tuple[Tensor, Tensor]:
        """(embeddings of the ids, their norm before the first layer with the context's rows below), [R, H] and [R + C, H]."""
        norm, scale = cast(DecoderLayer, self.layers[0]).input_layernorm, self.block.embedding_scale
        if scale == 1:
            return norm.embed(ids_R, self.embed_tokens.weight, context_CH)
        x_RH = F.embedding(ids_R, self.embed_tokens.weight) * scale
        normed_RH = norm(x_RH)
        return x_RH, normed_RH if context_CH is None else torch.cat((normed_RH, context_CH))

    def logits(self, hidden: Tensor) -> Tensor:
        logits, scale, softcap = super().logits(hidden), self.block.logit_scale, self.block.softcap
        logits = logits if scale == 1 else logits * scale
        return logits if softcap is None else (logits / softcap).tanh() * softcap

    def block_ids(self, anchors: Tensor) -> Tensor:
        """[..., B] int64: the last known token, then mask tokens."""
        return F.pad(anchors[..., None], (0, self.block.size - 1), value=self.block.mask_id)

    def drafts(self, features_NTF: Tensor, ids_NT: Tensor, anchors_NA: Tensor, steps: int) -> Tensor:
        (N, A), B, T, device = anchors_NA.shape, self.block.size, ids_NT.shape[1], ids_NT.device
        at_NR = (anchors_NA[..., None] + torch.arange(B, dtype=torch.int64, device=device)).flatten(1)
        block_R = torch.arange(A, dtype=torch.int64, device=device).repeat_interleave(B)
        at_NT = torch.arange(T, dtype=torch.int64, device=device).expand(N, T)
        none_NT = torch.full_like(at_NT, -1)
        rows = DenseBlockRows(
            torch.cat((at_NR, at_NT), dim=1),
            torch.cat((block_R, none_NT[0])),
            torch.cat(((anchors_NA - 1).repeat_interleave(B, 1), none_NT), dim=1),
        )
        attn = self.masked(rows, A * B, (A * B, T))
        ids_NAB = self.block_ids(ids_NT.gather(1, anchors_NA))
        positions = torch.cat((at_NR.flatten(), at_NT.flatten()))
        hidden = self(ids_NAB.flatten(), self.fuse(features_NTF.flatten(0, 1)), positions, attn).view(N, A, B, -1)
        first = int(self.block.skips_anchor)
        return hidden[:, :, first : first + steps]

    def make_pass(self, backend: Backend, cache: KVCache, steps: int) -> BlockPass:
        return ContextPass(self, backend, cache, steps)

    def check(self, spec: SpecConfig) -> None:
        super().check(spec)
        most = self.block.max_steps
        if most is not None and spec.max_steps > most:
            raise ValueError(
                f"num_steps must be at most {most}, the tokens that this head drafts in a pass, got {spec.num_steps}; nearest "
                f"setting that works: {f'num_draft_tokens={most + 1}' if spec.is_auto else f'num_steps={most}'}"
            )


def attended(
    layer: SelfAttention, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, index: int, rows: int
) -> Tensor | Partials:
    """[R, H]: the attention of the first `rows` of T rows, of all of which keys and values are kept."""
    norm = layer.qk_norm
    prep = HeadPrep(rotation, layer.num_kv_heads, norm.weight if norm else None, norm.eps if norm else 0.0)
    inputs = FirstRows(layer.qkv_proj(x_TH).unflatten(-1, (-1, layer.head_dim)), prep, rows)
    return layer.o_proj(attn(index, inputs).flatten(1), partials=True)


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
    """A DFlash head with a Markov head, and perhaps with an estimate that the next token is accepted.

    stop_below: see STOP_BELOW.
    """

    reads_drafts = True
    stop_below = STOP_BELOW

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        super().__init__(config, max_positions)
        model, r = config.model, self.block.markov_rank
        self.markov = Markov(self.block, model.hidden_size, model.vocab_size, config.draft_vocab_size, model.shard)
        self.confidence = None
        if self.block.confidence != "none":
            width = model.hidden_size + (r if self.block.confidence == "markov" else 0)
            self.confidence = Linear(width, 1, bias=True)

    def parts(self, names: PartNames) -> Iterator[Part]:
        yield from super().parts(names)
        markov = self.markov
        named = {"markov_w1": markov.w1, "markov_w2": markov.w2, "gate_proj": markov.gate, "joint_proj": markov.joint}
        yield from ((f"{names.markov}{name}", part) for name, part in named.items() if part is not None)
        if self.confidence is not None:
            yield names.confidence, self.confidence

    def tree(self, hidden_BSH: Tensor, bonus_B: Tensor, spec: SpecConfig, noise: Noise | None = None) -> DraftTree:
        walk = MarkovWalk(self, hidden_BSH, noise, self.stop_below)
        return walk.chain(bonus_B) if spec.topk == 1 else walk.tree(bonus_B, spec)

    def walk(self, hidden: Tensor, before: Tensor) -> Tensor:
        state, rows = None, []
        for own, embedded in zip(hidden.unbind(-2), self.markov.embed(before).unbind(-2), strict=True):
            row, state = self.markov.step(own, embedded, state)
            rows.append(row)
        return self.logits(hidden) + self.markov.w2(torch.stack(rows, dim=-2))

    def estimates(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        return None if self.confidence is None else self.confidences(hidden, self.markov.embed(before))

    def confidences(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[...]: logits of the estimates.  hidden: [..., H].  embedded: [..., r], the tokens before (`Markov.embed`)."""
        assert self.confidence is not None
        if self.block.confidence == "markov":
            hidden = torch.cat((hidden, embedded), dim=-1)
        return self.confidence(hidden)[..., 0]
