"""Targets of the Llama family: Llama 2/3/3.1+, Mistral, Qwen2, Qwen3, by the switches of their config.

One signature: ids, positions and this pass's attention in; final hidden states and captured aux states out.  Logits are a
second call, for the rows that are read.  Knows no phase, page or tree.

Shapes: T tokens, H hidden, V vocabulary, A captured states side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.config import ModelConfig
from specdec.models.layers import MLP, AttentionFn, Embedding, Linear, RMSNorm, Rotary, SelfAttention
from specdec.models.target import Target, TargetOutput
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows


class DecoderLayer(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x_TH: Tensor,
        normed_TH: Tensor,
        rotation: Rotation,
        attn: AttentionFn,
        layer: int,
        rows_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(residual stream, what is still to be added to it), from the stream and its norm; of rows_R only, if given.

        The sum is left to the next norm, which does it in the same launch.
        """
        attended = self.self_attn(normed_TH, rotation, attn, layer, rows_R)
        x = x_TH if rows_R is None else select_rows(x_TH, rows_R)
        x, normed = self.post_attention_layernorm.add(x, attended)
        return x, self.mlp(normed)


class CausalLM(Target):
    """A decoder-only language model.  max_positions: the rotary table's length, look-ahead included."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.make_layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config.rope, config.head_dim, max_positions)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        """What other families override."""
        return DecoderLayer(config)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attn: AttentionFn,
        aux_layers: Sequence[int] = (),
        rows_R: Tensor | None = None,
    ) -> TargetOutput:
        """aux_layers: ascending 0-based layers whose output (the residual stream, not normed) is captured, of all tokens.

        rows_R: the tokens whose final hidden state is wanted, None for all: the last layer does no more than it must.
        """
        x = F.embedding(ids_T, self.embed_tokens.weight)
        rotation = self.rotary.at(positions_T)
        layers = [cast(DecoderLayer, layer) for layer in self.layers]
        next_norms = [layer.input_layernorm for layer in layers[1:]] + [self.norm]
        normed, captured = layers[0].input_layernorm(x), []
        last = len(layers) - 1
        early = rows_R if last not in aux_layers else None
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            x, delta = layer(x, normed, rotation, attn, index, early if index == last else None)
            x, normed = next_norm.add(x, delta)
            if index in aux_layers:
                captured.append(x)
        hidden = normed if rows_R is None or early is not None else select_rows(normed, rows_R)
        return TargetOutput(hidden, torch.cat(captured, dim=-1) if captured else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] for the rows given."""
        return self.lm_head(hidden)
