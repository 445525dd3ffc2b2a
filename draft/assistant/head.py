"""An assistant: layers with queries alone, which read what layers of the target keep of the committed text.

It reads a token and a state: at first the target's final hidden state of the token before it, then its own output, projected to
the target's width.  It stores nothing, so the tokens that it has drafted are no keys, and every draft of a round stands at the
root's position.  This module knows no tree and no cache.

Shapes: R tokens, H its own hidden size, F the target's, V vocabulary, W this rank's run of it.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.config import SpecConfig
from specdec.draft.assistant.centroids import Centroids
from specdec.draft.assistant.config import AssistantConfig
from specdec.draft.drafter import BorrowedKeys, Drafter, DrafterContext, DraftNeeds, Impression
from specdec.draft.head import Head
from specdec.models.gemma4.modules import GemmaLayer, rounded
from specdec.models.layers import RMSNorm, Rotary
from specdec.models.linear import Linear
from specdec.models.target import Target
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary


class Assistant(Head):
    """config: of this rank's share.  read: for each layer, the target's layer whose keys and values it reads."""

    def __init__(self, config: AssistantConfig, read: tuple[int, ...], max_positions: int) -> None:
        super().__init__()
        model, size = config.model, config.target_size
        H = model.hidden_size
        self.config, self.read, self.feature_size, self.d2t_V = config, read, size, None
        self.pre_projection, self.post_projection = Linear(2 * size, H), Linear(H, size)
        self.layers = nn.ModuleList(GemmaLayer(model, index, shares_kv=True) for index in range(model.num_layers))
        self.norm = RMSNorm(H, model.rms_norm_eps)
        self.lm_head = Linear.vocabulary(H, model.vocab_size, model.shard)
        self.centroids = None if config.centroids is None else Centroids(config.centroids, H, model.vocab_size)
        self.vocabulary = Vocabulary.of(model.vocab_size, ALONE)
        self.rotaries = nn.ModuleList(Rotary(heads.rope, heads.head_dim, max_positions) for heads in model.all_heads)
        self.embedding_multiplier = 1.0  # what the target multiplies its embeddings with

    def borrow(self, target: Target) -> None:
        self.embed_tokens = target.embed_tokens
        self.embedding_multiplier = rounded(target.config.embedding_multiplier, target.embed_tokens.weight.dtype)

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds((), borrowed=BorrowedKeys(self.read, self.config.model))

    def check(self, spec: SpecConfig) -> None:
        super().check(spec)
        if (own := self.centroids) is not None and spec.topk > (most := own.sizes.top_k * own.tokens_Cn.shape[1]):
            raise ValueError(
                f"topk must be at most the tokens that get logits, {most}, got {spec.topk}; nearest setting: topk={most}"
            )

    @property
    def description(self) -> str:
        model = self.config.model
        lists = f", logits of {own.top_k} of {own.count} lists of tokens" if (own := self.config.centroids) else ""
        return (
            f"an assistant: {model.num_layers} layers of hidden_size {model.hidden_size} that read keys and values of the "
            f"target's layers {', '.join(map(str, sorted(set(self.read))))}{lists}"
        )

    @property
    def trained_length(self) -> int:
        return self.config.model.max_position

    def slots(self, spec: SpecConfig) -> int:
        return 0

    def passes(self, spec: SpecConfig) -> int:
        return spec.max_steps

    def worker(self, context: DrafterContext) -> Drafter:
        from specdec.draft.assistant.worker import AssistantWorker  # which knows assistants, too

        return AssistantWorker(self, context)

    def smoke(self, target: Target, ids_T: Tensor) -> Impression:
        from specdec.draft.assistant.smoke import AssistantLook  # which knows assistants, too

        return AssistantLook().impression(self, target, ids_T)

    def fuse(self, features_TF: Tensor) -> Tensor:
        return features_TF

    def forward(self, ids_R: Tensor, hidden_RF: Tensor, positions_R: Tensor, attn: AttentionFn) -> Tensor:
        """[R, H]: the outputs after the last norm, of which `logits` and `recycled` are made.

        ids_R, positions_R: int64.  hidden_RF: of the token before each.  attn: of the target's layers.
        """
        embedded_RF = F.embedding(ids_R, self.embed_tokens.weight) * self.embedding_multiplier
        x: Tensor = self.pre_projection(torch.cat((embedded_RF, hidden_RF), dim=-1))
        model, layers = self.config.model, [cast(GemmaLayer, layer) for layer in self.layers]
        rotations = [cast(Rotary, rotary).at(positions_R) for rotary in self.rotaries]
        next_norms = [*(cast(RMSNorm, layer.input_layernorm) for layer in layers[1:]), self.norm]
        normed: Tensor = layers[0].input_layernorm(x)
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            rotation = rotations[model.all_heads.index(model.heads_of(index))]
            x, delta = layer(x, normed, rotation, attn, self.read[index])
            x, normed = next_norm.add(x, delta)
        return normed

    def recycled(self, z_RH: Tensor) -> Tensor:
        """[R, F]: what stands for the target's state where the next token is drafted."""
        return cast(Tensor, self.post_projection(z_RH))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, W] of outputs [R, H]."""
        return self.read_out(hidden) if self.centroids is None else cast(Tensor, self.centroids(hidden, self.lm_head))
