"""Stand-ins for the cache that transformers' encoder-decoder models ask for keys and values; they hold none of a text's.

A decoder of such a model asks its cache three things: how many tokens came before, what to keep, and whether the encoder's
keys and values are there already.  The stand-ins answer so that the model's own code computes positions and queries alone, or,
once a text, the keys and values of the encoder's tokens.

Shapes: T tokens of the decoder, S tokens of the encoder, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from transformers import EncoderDecoderCache


class CrossKeys(NamedTuple):
    """What a layer's cross attention is told to read: a sign that says that attention has the keys and values itself."""

    keys: Tensor
    values: Tensor


class _OwnTokens:
    """The decoder's own tokens.  before_T: for each, its position minus its place in the pass."""

    def __init__(self, before_T: Tensor) -> None:
        self.before_T = before_T

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self.before_T

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return key, value


class _EncoderTokens:
    """The encoder's tokens.  layers: what each layer reads.  seen: the keys and values [1, K, S, D] that layers computed."""

    def __init__(self, layers: list[CrossKeys]) -> None:
        self.layers = layers
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = key, value
        return key, value


class StoredText(EncoderDecoderCache):
    """The cache of one pass of a decoder.

    before_T: see _OwnTokens.
    sign: handed to attention as the keys and values of every cross attention, which then are not computed.  None: each layer
        computes them from the encoder's output, and `seen` holds them after the pass.
    """

    def __init__(self, before_T: Tensor, num_layers: int, sign: Tensor | None) -> None:
        self.self_attention_cache = _OwnTokens(before_T)
        layers = [] if sign is None else [CrossKeys(sign, sign)] * num_layers
        self.cross_attention_cache = _EncoderTokens(layers)
        self.is_updated = dict.fromkeys(range(num_layers), sign is not None)

    @property
    def seen(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By layer, the encoder's keys and values [1, K, S, D] that the pass computed."""
        return self.cross_attention_cache.seen
