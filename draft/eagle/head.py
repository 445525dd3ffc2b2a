"""EAGLE draft heads: EAGLE-3 (arXiv 2503.01840) and EAGLE-1/2 (arXiv 2401.15077).

Pair i (draft/head.py) stands at rotary position i.  This module knows no tree, cache or verifier.

Shapes: T pairs, H hidden, F the target's features of one token, concatenated, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.draft.drafter import Drafter, DrafterContext, Impression
from specdec.draft.eagle.worker import DraftWorker
from specdec.draft.formats.parts import Part, layer_parts
from specdec.draft.formats.reading import PartNames
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.head import DraftHead, StepHead
from specdec.models.causal_lm import DecoderLayer, PreNormLayer
from specdec.models.config import ModelConfig
from specdec.models.latent.attention import LatentAttention, LatentLayer
from specdec.models.latent.config import LatentConfig
from specdec.models.layers import MLP, RMSNorm, SelfAttention
from specdec.models.linear import Linear
from specdec.models.target import Target
from specdec.ops.norm import pair_rms_norm
from specdec.ops.products.partials import added_up
from specdec.ops.rows import select_rows


class EagleHead(StepHead, DraftHead):
    """An EAGLE head."""

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        super().__init__(config, max_positions)
        self.hidden_size = config.model.hidden_size

    def worker(self, context: DrafterContext) -> Drafter:
        return DraftWorker(self, context)

    def smoke(self, target: Target, ids_T: Tensor) -> Impression:
        from specdec.draft.eagle.smoke import EagleLook  # which knows heads, too

        return EagleLook().impression(self, target, ids_T)


class Eagle3Head(EagleHead):
    """A decoder layer over [normed embedding, normed feature], and perhaps ordinary layers after it.

    `fc` fuses the features of several target layers into one; norms may stand before it.
    """

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        super().__init__(config, max_positions)
        model, eps = config.model, config.model.rms_norm_eps
        H, F = model.hidden_size, config.feature_size
        norms = {"none": 0, "joint": 1, "each": F // config.target_hidden_size}[config.feature_norm]
        self.feature_norms = nn.ModuleList(RMSNorm(F // norms, eps) for _ in range(norms))
        self.fc = Linear(F, H)
        self.input_layernorm = RMSNorm(H, eps)
        self.hidden_norm = RMSNorm(H, eps)
        self.self_attn = attention_over(model, 2 * H)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = MLP(model)
        self.layers = nn.ModuleList(layer_of(model, index) for index in range(1, model.num_layers))
        self.norm = RMSNorm(H, eps)

    def parts(self, names: PartNames) -> Iterator[Part]:
        yield names.fc, self.fc
        yield from zip(names.feature_norms, self.feature_norms, strict=True)
        yield from layer_parts(self, names.first)
        yield f"{names.first}.hidden_norm", self.hidden_norm
        for layer, name in zip(self.layers, names.layers, strict=True):
            yield from layer_parts(layer, name, names.input_norm)
        yield "norm", self.norm

    @property
    def returns_normed(self) -> bool:
        """Whether `forward` returns the output after the final norm."""
        return self.config.recycles_normed

    def once_bytes(self, rows: int) -> int:
        return self.fc.read_bytes(rows)  # features are fused in the extend only

    def fuse(self, features_TF: Tensor) -> Tensor:
        if len(self.feature_norms):
            parts = features_TF.unflatten(-1, (len(self.feature_norms), -1)).unbind(-2)
            normed = [norm(part.contiguous()) for norm, part in zip(self.feature_norms, parts, strict=True)]
            features_TF = torch.cat(normed, dim=-1)
        return self.fc(features_TF)

    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        return self._outputs(ids_T, hidden_TH, positions_T, attn, rows_R)[0]

    def level(self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn) -> tuple[Tensor, Tensor]:
        hidden_TH, read_TH = self._outputs(ids_T, hidden_TH, positions_T, attn)
        return hidden_TH, self.read_out(read_TH)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.read_out(self.norm(hidden) if self.config.norms_logits and not self.returns_normed else hidden)

    def _outputs(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(what `forward` returns, what the language-model head reads).

        One launch adds and norms: a sum by torch would keep the kernels after it from starting early.
        """
        embed, norm, H = self.embed_tokens.weight, self.hidden_norm, hidden_TH.shape[-1]
        rotation, layers = self.rotary.at(positions_T), [cast(PreNormLayer, layer) for layer in self.layers]
        x = pair_rms_norm(ids_T, embed, self.input_layernorm.weight, hidden_TH, norm.weight, norm.eps)
        residual = x[:, H:] if self.config.norm_before_residual else hidden_TH
        rows = None if layers else rows_R  # only the last layer may leave rows out
        residual = residual if rows is None else select_rows(residual, rows)
        attended = self.self_attn(x, rotation, attn, 0, rows)
        residual, normed = self.post_attention_layernorm.add(residual, attended)
        ends_in_norm = self.returns_normed or self.config.norms_logits
        delta = self.mlp(normed, partials=bool(layers) or ends_in_norm)
        for index, layer in enumerate(layers, 1):
            residual, normed = layer.input_layernorm.add(residual, delta)
            residual, delta = layer(residual, normed, rotation, attn, index, rows_R if index == len(layers) else None)
        if not ends_in_norm:
            hidden = self.group.all_reduce_add(residual, added_up(delta))
            return hidden, hidden
        total, normed = self.norm.add(residual, delta)
        return normed if self.returns_normed else total, normed


def attention_over(model: ModelConfig, in_features: int) -> nn.Module:
    """The first layer's attention, over keys or over latents as its config says."""
    if isinstance(model, LatentConfig):
        return LatentAttention(model, 0, in_features)
    return SelfAttention(model, in_features)


def layer_of(model: ModelConfig, index: int) -> PreNormLayer:
    """A later layer."""
    return LatentLayer(model, index) if isinstance(model, LatentConfig) else DecoderLayer(model)


class Eagle1Head(EagleHead):
    """EAGLE-1/2: `fc` over [embedding, feature], then decoder layers, of which the first has no input norm.

    Its language-model head is the target's.
    """

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        super().__init__(config, max_positions)
        model = config.model
        self.fc = Linear(model.hidden_size + config.target_hidden_size, model.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(DecoderLayer(model) for _ in range(model.num_layers))
        self.layers[0].input_layernorm = nn.Identity()
        cast(DecoderLayer, self.layers[-1]).norm_follows = False

    def parts(self, names: PartNames) -> Iterator[Part]:
        yield names.fc, self.fc
        for layer, name in zip(self.layers, (names.first, *names.layers), strict=True):
            yield from layer_parts(layer, name)

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
        return self.group.all_reduce_add(x, added_up(delta))
