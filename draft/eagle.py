"""EAGLE draft heads: EAGLE-3 (arXiv 2503.01840) and EAGLE-1/2 (arXiv 2401.15077), one interface.

A head reads pairs: pair i is (embedding of token i + 1, feature of token i), at rotary position i, and predicts token i + 2.
Its hidden output stands in for the next pair's feature.  Knows no tree, cache or verifier.

Shapes: T pairs, H hidden, F target features side by side, V draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from specdec.models.causal_lm import DecoderLayer
from specdec.models.config import ModelConfig
from specdec.models.layers import MLP, AttentionFn, Embedding, Linear, RMSNorm, Rotary, SelfAttention
from specdec.ops.norm import pair_rms_norm
from specdec.ops.rows import select_rows


@dataclass(frozen=True)
class HeadConfig:
    """A head's own sizes (`model`) and how it hangs on its target.

    aux_layers: ascending 0-based target layers whose outputs are its features; empty: the target's final hidden state.
    target_hidden_size: width of one feature.  draft_vocab_size: rows of its language-model head.
    fc_bias: EAGLE-1/2 only.  norm_before_residual: EAGLE-3 heads whose residual is the normed feature.
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
        """F: width of a token's features, as the target hands them over."""
        return max(1, len(self.aux_layers)) * self.target_hidden_size


class DraftHead(nn.Module):
    """What the draft worker needs of a head.

    Embedding and language-model head may be the target's own modules.  d2t_V maps draft ids to target ids by offset; None
    when the vocabularies are one.
    """

    def __init__(self, config: HeadConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        model = config.model
        self.embed_tokens = Embedding(model.vocab_size, model.hidden_size)
        self.lm_head = Linear(model.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t_V", None)
        self.d2t_V: Tensor | None
        self.rotary = Rotary(model.rope, model.head_dim, max_positions)

    @abstractmethod
    def fuse(self, features_TF: Tensor) -> Tensor:
        """Target features to the head's own width [T, H]; done once, when they come from the target."""

    @abstractmethod
    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        """One step over pairs: hidden [T, H], the next pair's feature and what `logits` reads; of rows_R only, if given."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] over the draft vocabulary."""


class Eagle3Head(DraftHead):
    """One layer over [normed embedding, normed feature]; features are fused from several target layers by `fc`."""

    def __init__(self, config: HeadConfig, max_positions: int) -> None:
        super().__init__(config, max_positions)
        model, eps = config.model, config.model.rms_norm_eps
        H = model.hidden_size
        self.fc = Linear(len(config.aux_layers) * config.target_hidden_size, H, bias=False)
        self.input_layernorm = RMSNorm(H, eps)
        self.hidden_norm = RMSNorm(H, eps)
        self.self_attn = SelfAttention(model, 2 * H)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = MLP(model)
        self.norm = RMSNorm(H, eps)

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
        return residual + self.mlp(normed)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


class Eagle1Head(DraftHead):
    """EAGLE-1/2: `fc` over [embedding, feature], then decoder layers, the first without an input norm; the target's head."""

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
        return x + delta

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


HEADS: dict[str, type[DraftHead]] = {"eagle3": Eagle3Head, "eagle1": Eagle1Head}
