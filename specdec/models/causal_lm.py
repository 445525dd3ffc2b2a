"""Targets of the Llama family: Llama 2, 3 and 3.x, Mistral, Qwen2 and Qwen3, told apart by switches of their config.

A forward pass takes token ids, positions and this pass's attention, and returns final hidden states and captured layer outputs.
The caller asks for logits in a second call, so only the rows that somebody reads are multiplied with the vocabulary.  This file
knows no phase of a round, no page and no tree.

Shapes: T tokens, H hidden size, V vocabulary, R rows asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn, LayerInputs
from specdec.attention.kinds import PLAIN, Scoring
from specdec.models.config import ModelConfig
from specdec.models.layers import MLP, Embedding, NoNorm, RMSNorm, Rotary, SelfAttention
from specdec.models.linear import Linear
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.target import Target, TargetOutput
from specdec.ops.products.partials import Delta, NormedProduct
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows
from specdec.parallel.group import ALONE
from specdec.parallel.shard import Shard
from specdec.parallel.vocabulary import Vocabulary


class TargetLayer(nn.Module, ABC):
    """A layer of a target.  input_layernorm: the norm of the residual stream before it, which the layer before applies."""

    input_layernorm: RMSNorm | NoNorm

    @abstractmethod
    def forward(
        self,
        x_TH: Tensor,
        normed_TH: Tensor,
        rotation: Rotation,
        attn: AttentionFn,
        layer: int,
        rows_R: Tensor | None = None,
    ) -> tuple[Tensor, Delta | NormedProduct | None]:
        """The pair (residual stream, what the caller still has to add to the stream), each [T, H] or [R, H]; None: nothing.

        The next layer's norm adds the two in its own kernel launch, which saves a launch a layer.
        x_TH: the residual stream.  normed_TH: the stream after this layer's input norm.  rows_R: if given, the pair is computed
        for these tokens only; the keys and values of all tokens are kept all the same.
        """


class PreNormLayer(TargetLayer):
    """A pre-norm transformer block: attention, then an MLP, each added to the residual stream.

    self_attn, mlp: the two modules of the block, called as SelfAttention and MLP are.  Latent attention and mixtures of experts
    take the same arguments, so every family's layers share this forward pass.
    norm_follows: whether a norm adds the output to the residual stream; it can add up split-K partials, too.
    """

    norm_follows = True

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.zero_centred_norms)
        self.input_layernorm: RMSNorm | NoNorm = norm
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.zero_centred_norms)
        self.mlp = mlp

    def forward(
        self,
        x_TH: Tensor,
        normed_TH: Tensor,
        rotation: Rotation,
        attn: AttentionFn,
        layer: int,
        rows_R: Tensor | None = None,
    ) -> tuple[Tensor, Delta | NormedProduct]:
        """See TargetLayer."""
        attended = self.self_attn(normed_TH, rotation, attn, layer, rows_R)
        x = x_TH if rows_R is None else select_rows(x_TH, rows_R)
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp.after_norm(x, attended, self.post_attention_layernorm, partials=self.norm_follows)
        x, normed = self.post_attention_layernorm.add(x, attended)
        adds_up = self.norm_follows and isinstance(self.mlp, MLP)
        return x, self.mlp(normed, partials=True) if adds_up else self.mlp(normed)


class DecoderLayer(PreNormLayer):
    """A decoder layer of the Llama family; EAGLE-1 heads are made of such layers too.  shares_kv: as of SelfAttention."""

    self_attn: SelfAttention
    mlp: MLP

    def __init__(self, config: ModelConfig, shares_kv: bool = False) -> None:
        super().__init__(config, SelfAttention(config, config.hidden_size, shares_kv), MLP(config))


def decoder_layer(config: ModelConfig, index: int) -> PreNormLayer:
    """The layer of that number in a target of the Llama family."""
    return DecoderLayer(config, shares_kv=config.kv_source[index] != index)


MakeLayer = Callable[[Any, int], TargetLayer]  # from a family's config and the layer's number


def rows_of(attn: AttentionFn, asked_R: Tensor) -> AttentionFn:
    """The attention of layers that have the queries of these rows only, and no keys and values."""

    def asked(layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        assert rows_R is None
        return attn(layer, inputs, asked_R, scoring)

    return asked


def own_rows(table_VH: Tensor, shard: Shard) -> Tensor:
    """The rows of a table whose tokens' logits this rank computes, as a parameter that shares the table's memory."""
    return table_VH if shard.size == 1 else nn.Parameter(table_VH.detach()[shard.piece(len(table_VH))])


class CausalLM(Target):
    """A decoder-only language model of the Llama family.

    max_positions: length of the rotary table; the table must also cover the look-ahead positions of draft tokens.
    make_layer: of families with another attention or MLP, what makes the layer of a number, counted from 0.
    """

    def __init__(self, config: ModelConfig, max_positions: int, make_layer: MakeLayer = decoder_layer) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(make_layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.zero_centred_norms)
        self.vocabulary = Vocabulary.of(config.vocab_size, ALONE)
        if config.tie_embeddings:
            self.lm_head = Linear.of(own_rows(self.embed_tokens.weight, config.shard))
        else:
            self.lm_head = Linear.vocabulary(config.hidden_size, config.vocab_size, config.shard)
        turned = list(dict.fromkeys((heads.rope, heads.head_dim) for heads in (config.heads, *config.all_heads)))
        self.rotary = Rotary(*turned[0], max_positions)
        self.other_rotaries = nn.ModuleList(Rotary(*each, max_positions) for each in turned[1:])
        layers = map(config.heads_of, range(config.num_layers))
        self._rotary_of = [turned.index((heads.rope, heads.head_dim)) for heads in layers]  # by layer

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attn: AttentionFn,
        aux_layers: Sequence[int] = (),
        rows_R: Tensor | None = None,
    ) -> TargetOutput:
        """See Target.forward.

        With rows_R, layers whose other rows nobody reads compute those rows only: the last layer, and all layers of the model's
        end that store no keys and values.  The output of a captured layer has every token.
        """
        rotations = self._rotations(positions_T)
        layers = [cast(TargetLayer, layer) for layer in self.layers]
        next_norms = [layer.input_layernorm for layer in layers[1:]] + [self.norm]
        x, normed = self._embed(ids_T, layers[0].input_layernorm)
        own_TLP = self.layer_inputs(ids_T, x)
        assert len(set(aux_layers)) == len(aux_layers) and all(0 <= index < len(layers) for index in aux_layers), aux_layers
        aux_TAH = x.new_empty(x.shape[0], len(aux_layers), x.shape[1])  # the norms after these layers write their outputs here
        last, first = len(layers) - 1, self.config.first_of_rows(aux_layers)
        asked = rows_R  # None as soon as x has these rows only
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            if asked is not None and index == first:
                x, normed = select_rows(x, asked), select_rows(normed, asked)
                rotations = self._rotations(positions_T.index_select(0, asked))
                own_TLP = None if own_TLP is None else own_TLP.index_select(0, asked)
                attn, asked = rows_of(attn, asked), None
            early = asked if index == last and last not in aux_layers else None
            own = () if own_TLP is None else (own_TLP[:, index],)
            x, delta = layer(x, normed, rotations[self._rotary_of[index]], attn, index, early, *own)
            x, normed = next_norm.add(x, delta, aux_TAH[:, aux_layers.index(index)] if index in aux_layers else None)
            asked = asked if early is None else None
        hidden = normed if asked is None else select_rows(normed, asked)
        return TargetOutput(hidden, aux_TAH.flatten(1) if len(aux_layers) else None)

    def chain(self) -> nn.ModuleList:
        """See Target.chain."""
        return self.layers

    def layer_inputs(self, ids_T: Tensor, x_TH: Tensor) -> Tensor | None:
        """[T, layers, P]: what each layer reads of each token beside the residual stream, given the embeddings; None: nothing.

        Layers of families with such inputs take them as one argument more, of all T tokens.
        """
        return None

    def _rotations(self, positions_T: Tensor) -> list[Rotation]:
        """Of each rotary table, for tokens at these positions."""
        return [cast(Rotary, rotary).at(positions_T) for rotary in (self.rotary, *self.other_rotaries)]

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of final hidden states [..., H]."""
        logits, config = self.lm_head(hidden), self.config
        logits = logits if config.logits_multiplier == 1 else logits * config.logits_multiplier
        return logits if config.logits_divisor == 1 else logits / config.logits_divisor

    def _embed(self, ids_T: Tensor, norm: RMSNorm | NoNorm) -> tuple[Tensor, Tensor]:
        """The pair (embeddings as the residual stream has them, their norm)."""
        if (times := self.config.embedding_multiplier) == 1:
            return norm.embed(ids_T, self.embed_tokens.weight)
        x_TH = F.embedding(ids_T, self.embed_tokens.weight) * times
        return x_TH, norm(x_TH)
