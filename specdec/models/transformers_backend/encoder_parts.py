"""Splits a transformers encoder-decoder model into the pieces of a target: also its encoder, and what reads its output.

The model's own code computes everything but attention.  A text is read once: the encoder's states become each decoder layer's
keys and values for cross attention, which the caller keeps.  The decoder's cache is a stand-in, which holds none of a text's.
This file does not know attention.

Shapes: T tokens of the decoder, S tokens of the encoder, H hidden size, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import Seq2SeqModelOutput

from specdec.models.transformers_backend.attention import Answer, AttentionCall, answering
from specdec.models.transformers_backend.parts import CountedTokens, ModelParts, Unsupported, freeze_rope

# Families whose encoder reads tokens and whose layers hand attention nothing but heads and a scale.
ENCODER_DECODERS = ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart", "t5gemma")


def decoder_config(config: Any) -> Any:
    """The part of an encoder-decoder model's config that describes its decoder: the config itself, or one inside of it."""
    return getattr(config, "decoder", config)


def num_decoder_layers(config: Any) -> int:
    """How many layers the decoder has; config: the whole model's.  num_hidden_layers may be the encoder's number."""
    own = decoder_config(config)
    count: int = own.decoder_layers if own is config else own.num_hidden_layers
    return count


# ---- stand-ins for the cache of which a decoder asks three things: how many tokens came before, what to keep, and whether the
# encoder's keys and values are there already ----


class CrossKeys(NamedTuple):
    """What a layer's cross attention is told to read: a sign that says that attention has the keys and values itself."""

    keys: Tensor
    values: Tensor


class _EncoderTokens:
    """The encoder's tokens.  layers: what each layer reads.  seen: the keys and values [1, K, S, D] that layers computed."""

    def __init__(self, layers: list[CrossKeys]) -> None:
        self.layers = layers
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = key, value
        return key, value


class StoredText(EncoderDecoderCache):
    """The cache of one pass of a decoder over tokens at these positions.

    sign: handed to attention as the keys and values of every cross attention, which then are not computed.  None: each layer
        computes them from the encoder's output, and `seen` holds them after the pass.
    """

    def __init__(self, positions_T: Tensor, num_layers: int, sign: Tensor | None) -> None:
        self.self_attention_cache = CountedTokens(positions_T)
        layers = [] if sign is None else [CrossKeys(sign, sign)] * num_layers
        self.cross_attention_cache = _EncoderTokens(layers)
        self.is_updated = dict.fromkeys(range(num_layers), sign is not None)

    @property
    def seen(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By layer, the encoder's keys and values [1, K, S, D] that the pass computed."""
        return self.cross_attention_cache.seen


# ---- the pieces ----


class EncoderDecoderParts(ModelParts):
    """The pieces of a transformers encoder-decoder model.

    encoder: the model without its decoder and its language-model head.  decoder, layers, head: as in ModelParts.

    Unsupported is raised for a model whose decoder has no list of as many layers as its config says.
    """

    def __init__(self, model: Any) -> None:
        self.encoder, self.decoder, count = model.get_encoder(), model.get_decoder(), num_decoder_layers(model.config)
        layers = getattr(self.decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) != count:
            raise Unsupported(f"expected a list of {count} decoder layers in {type(self.decoder).__name__}, found none")
        self.layers = layers
        for part in (self.encoder, self.decoder):
            freeze_rope(part)
        setattr(model, model.base_model_prefix, _PassThroughModel(self.decoder))
        self.head = model
        # Never read; that a call was given it says that the call is cross attention.
        self._sign = self.decoder.get_input_embeddings().weight.new_empty(1, 1, 1, 1)

    def is_cross(self, call: AttentionCall) -> bool:
        """Whether a call of a pass of `hidden` reads the encoder's keys and values, which attention has to supply."""
        return call.key is self._sign

    def hidden(self, ids_T: Tensor, positions_T: Tensor, **more: Any) -> Tensor:
        """The decoder's hidden states [T, H] after the final norm."""
        unread = self.decoder.get_input_embeddings().weight.new_empty(1, 1, 1)
        text = StoredText(positions_T, len(self.layers), self._sign)
        return self._decoded(ids_T, text, unread, position_ids=positions_T[None], **more)

    def read_text(self, ids_S: Tensor, attend: Answer) -> Tensor:
        """[layers, S, 2, K, D]: each decoder layer's keys and values of a text that the encoder reads.

        attend: computes the encoder's attention.
        """
        with answering(attend):
            states = self.encoder(input_ids=ids_S[None], return_dict=True).last_hidden_state
        text = StoredText(torch.zeros_like(ids_S[:1]), len(self.layers), None)
        # One token is decoded, because a layer computes the encoder's keys and values while it decodes; its states are dropped.
        with answering(lambda call: call.query.transpose(1, 2)):
            self._decoded(ids_S[:1], text, states)
        return torch.stack([torch.stack([x[0].transpose(0, 1) for x in text.seen[i]], 1) for i in range(len(self.layers))])

    def _decoded(self, ids_T: Tensor, text: StoredText, states_1SH: Tensor, **more: Any) -> Tensor:
        unmasked = states_1SH.new_empty(1, 1)  # without a mask the model would make one, whose size it would read from a tensor
        out = self.decoder(
            input_ids=ids_T[None], attention_mask=unmasked, encoder_hidden_states=states_1SH, past_key_values=text,
            use_cache=False, return_dict=True, **more,
        )  # fmt: skip
        return out.last_hidden_state[0]


class _PassThroughModel(nn.Module):
    """Takes the place of encoder and decoder inside the language model, and returns the hidden states that it is given.

    decoder: the one that it replaces; the language model asks it for its config.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self._replaced = (decoder,)  # not a submodule: the target holds it already

    def get_decoder(self) -> nn.Module:
        return self._replaced[0]

    def forward(self, *_: None, inputs_embeds: Tensor, **__: Any) -> Seq2SeqModelOutput:
        return Seq2SeqModelOutput(last_hidden_state=inputs_embeds)
