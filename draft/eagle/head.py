"""EAGLE draft heads, EAGLE-3 (arXiv 2503.01840) and EAGLE-1/2 (arXiv 2401.15077), with one interface.

A head reads pairs.  Pair i consists of the embedding of token i + 1 and the feature of token i, stands at rotary position i,
and predicts token i + 2.  Its hidden output takes the place of the next pair's feature.  This module knows no tree, cache or
verifier.

Shapes: T pairs, H hidden, F the target's features of one token, concatenated, V draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.config import SpecConfig
from specdec.draft.drafter import DraftModel, DraftNeeds, Place
from specdec.draft.eagle.worker import DraftWorker
from specdec.models.causal_lm import DecoderLayer
from specdec.models.config import ModelConfig
from specdec.models.layers import MLP, Embedding, RMSNorm, Rotary, SelfAttention
from specdec.models.linear import Linear
from specdec.ops.norm import pair_rms_norm
from specdec.ops.rows import select_rows
from specdec.parallel.group import ALONE, Group
from specdec.parallel.vocabulary import Vocabulary


@dataclass(frozen=True)
class HeadConfig:
    """A head's own sizes (`model`) and how it connects to its target.

    kind: "eagle3" or "eagle1".
    aux_layers: ascending 0-based target layers whose outputs are the head's features; empty: the target's final hidden state
        is.
    target_hidden_size: width of one feature.
    draft_vocab_size: rows of the head's language-model head.
    fc_bias: whether `fc` has a bias; EAGLE-1/2 only.
    norm_before_residual: whether the residual is the normed feature; EAGLE-3 only.
    """

    model: ModelConfig
    kind: str  # "eagle3" | "eagle1"
    aux_layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    fc_bias: bool = False
    norm_before_residual: bool = False

    @property
    def feature_size(self) -> int:
        """F: the width of one token's features as the target returns them."""
        return max(1, len(self.aux_layers)) * self.target_hidden_size


class DraftHead(DraftModel):
    """What the draft worker needs of a head.

    The embedding and the language-model head may be the target's own modules.
    vocabulary: which of its draft tokens' logits this rank computes.  group: the ranks that hold the head together.
    d2t_V: int64 offsets from draft token ids to target token ids; None if both use one vocabulary.
    """

    def __init__(self, config: HeadConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        model = config.model
        self.embed_tokens = Embedding(model.vocab_size, model.hidden_size)
        self.lm_head = Linear.vocabulary(model.hidden_size, config.draft_vocab_size, model.shard)
        self.vocabulary = Vocabulary.of(config.draft_vocab_size, ALONE)
        self.group: Group = ALONE
        self.register_buffer("d2t_V", None)
        self.d2t_V: Tensor | None
        self.rotary = Rotary(model.rope, model.head_dim, max_positions)

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds(self.config.aux_layers, (self.config.model,))

    def check(self, spec: SpecConfig) -> None:
        most = self.config.draft_vocab_size
        if spec.topk > most:
            raise ValueError(
                f"topk must be at most the draft vocabulary, {most}, got {spec.topk}; nearest setting: topk={most}"
            )

    def worker(self, place: Place) -> DraftWorker:
        return DraftWorker(self, place)

    def passes(self, spec: SpecConfig) -> int:
        return spec.max_steps

    @abstractmethod
    def fuse(self, features_TF: Tensor) -> Tensor:
        """Target features to the head's own width [T, H].  The worker does this once, when features come from the target."""

    @abstractmethod
    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        """One step over pairs: hidden [T, H], which is the next pair's feature and the input of `logits`.

        ids_T: int64, each pair's token.
        hidden_TH: each pair's feature, fused.
        positions_T: int64 rotary positions.
        rows_R: int64.  If given, only these rows' hidden states are returned: [R, H].
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V]: logits over the draft vocabulary."""


class Eagle3Head(DraftHead):
    """One decoder layer over [normed embedding, normed feature]; `fc` fuses the features of several target layers into one."""

    def __init__(self, config: HeadConfig, max_positions: int) -> None:
        super().__init__(config, max_positions)
        model, eps = config.model, config.model.rms_norm_eps
        H = model.hidden_size
        self.fc = Linear(len(config.aux_layers) * config.target_hidden_size, H)
        self.input_layernorm = RMSNorm(H, eps)
        self.hidden_norm = RMSNorm(H, eps)
        self.self_attn = SelfAttention(model, 2 * H)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = MLP(model)
        self.norm = RMSNorm(H, eps)

    @property
    def once_bytes(self) -> int:
        return self.fc.num_bytes  # features are fused in the extend only

    def fuse(self, features_TF: Tensor) -> Tensor:
        return self.fc(features_TF)

    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        embed, norm, H = self.embed_tokens.weight, self.hidden_norm, hidden_TH.shape[-1]
        x = pair_rms_norm(ids_T, embed, self.input_layernorm.weight, hidden_TH, norm.weight, norm.eps)
        residual = x[:, H:] if self.config.norm_before_residual else hidden_TH
        residual = residual if rows_R is None else select_rows(residual, rows_R)
        attended = self.self_attn(x, self.rotary.at(positions_T), attn, 0, rows_R)
        residual, normed = self.post_attention_layernorm.add(residual, attended)
        return self.group.add(residual, self.mlp(normed))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


class Eagle1Head(DraftHead):
    """EAGLE-1/2: `fc` over [embedding, feature], then decoder layers, of which the first has no input norm.

    Its language-model head is the target's.
    """

    def __init__(self, config: HeadConfig, max_positions: int) -> None:
        super().__init__(config, max_positions)
        model = config.model
        self.fc = Linear(model.hidden_size + config.target_hidden_size, model.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(DecoderLayer(model) for _ in range(model.num_layers))
        self.layers[0].input_layernorm = nn.Identity()

    def fuse(self, features_TF: Tensor) -> Tensor:
        return features_TF

    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        x = self.fc(torch.cat((self.embed_tokens(ids_T), hidden_TH), dim=-1))
        rotation = self.rotary.at(positions_T)
        layers = [cast(DecoderLayer, layer) for layer in self.layers]
        normed = x
        for index, layer in enumerate(layers[:-1]):
            x, delta = layer(x, normed, rotation, attn, index)
            x, normed = layers[index + 1].input_layernorm.add(x, delta)
        x, delta = layers[-1](x, normed, rotation, attn, len(layers) - 1, rows_R)
        return self.group.add(x, delta)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


HEADS: dict[str, type[DraftHead]] = {"eagle3": Eagle3Head, "eagle1": Eagle1Head}
