"""Finds out how a transformers model calls attention, by one run without weights on torch's `meta` device.

The run shows what a config does not say: which layers call attention, how often, with which heads, windows and sinks.  A model
whose code reads device memory on the host fails on the meta device; such a model could not run inside a CUDA graph either.
The trace refuses models whose attention is not what specdec computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.models.checkpoints.config_values import one_line
from specdec.models.transformers_backend.attention import NAME, AttentionCall, answering
from specdec.models.transformers_backend.encoder_parts import EncoderDecoderParts
from specdec.models.transformers_backend.make import InDtype, empty_model, make_parts
from specdec.models.transformers_backend.parts import ModelParts, Unsupported

TOKENS = 3  # length of the traced text
# Keyword arguments of attention that never change its result here: settings of the pass, and steps that the model did already.
_HARMLESS = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "layer_idx",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "kernel_options", "training",
}  # fmt: skip


class TracedCalls(NamedTuple):
    """A model's sizes and attention, as its layers' calls show them.

    head_dim: of queries and keys.  value_dim: of values.
    sliding_windows: for each layer, how many keys a query reads, or None for all.  softcap: the largest of any layer, or None.
    kv_source: for each layer, the layer whose keys and values it reads: its own number, or that of an earlier layer.
    has_alibi: for each layer, whether its logits get slopes times distances.
    features_refusal: why the layers' outputs can't be a draft head's features; empty if they can.
    encoder_head_dim: of the encoder's heads; None: there is no encoder.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    hidden_size: int
    sliding_windows: tuple[int | None, ...]
    softcap: float | None
    has_sinks: bool
    has_alibi: tuple[bool, ...]
    kv_source: tuple[int, ...]
    features_refusal: str
    encoder_head_dim: int | None


def trace(config: Any, where: str) -> TracedCalls:
    """Runs a model of this transformers config once and returns what its attention calls show.

    where: the config's name for error messages.  ValueError names `where` and the part of the model that specdec can't run.
    """
    parts: ModelParts | None = None
    calls: list[AttentionCall] = []
    of_encoder: list[AttentionCall] = []
    states: dict[int, Tensor] = {}
    ids_T = torch.zeros(TOKENS, dtype=torch.int64, device="meta")

    def record(call: AttentionCall) -> Tensor:
        calls.append(call)
        is_cross = isinstance(parts, EncoderDecoderParts) and parts.is_cross(call)  # it is given no values
        width = (call.query if is_cross else call.value).shape[3]
        return call.query.new_empty((1, TOKENS, call.query.shape[1], width))

    def record_encoder(call: AttentionCall) -> Tensor:
        of_encoder.append(call)
        return call.query.transpose(1, 2)

    try:
        with torch.device("meta"), InDtype(torch.float32), torch.no_grad(), answering(record):
            parts = make_parts(empty_model(config, torch.bfloat16).eval())
            parts.on_layers(states.__setitem__)
            if isinstance(parts, EncoderDecoderParts):
                kept = parts.read_text(ids_T, record_encoder)
            hidden = parts.hidden(ids_T, torch.arange(TOKENS, dtype=torch.int64, device="meta"))
            logits = parts.logits(hidden)
        if isinstance(parts, EncoderDecoderParts):
            calls = _own_calls(calls, of_encoder, parts, kept)
        _check_calls(calls, parts)
        kv_source = _kv_source(calls)
        features_refusal = _features_refusal(hidden, states)
        _check_logits(logits, config)
    except Unsupported as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # the model's own code may raise anything
        # A model without transformers' attention interface looks our name up in a table of its own classes.
        own = "has attention of its own" if isinstance(error, KeyError) and NAME in error.args else "can't run without values"
        raise ValueError(
            f"{where}: the code of {config.model_type} models {own} ({type(error).__name__}: {one_line(error)}); expected a "
            "family whose layers call transformers' attention interface and whose code reads no device memory on the host, "
            "such as a Llama"
        ) from error
    first = calls[0]
    return TracedCalls(
        num_heads=first.query.shape[1],
        num_kv_heads=first.key.shape[1],
        head_dim=first.key.shape[3],
        value_dim=first.value.shape[3],
        hidden_size=hidden.shape[-1],
        sliding_windows=tuple(call.sliding_window for call in calls),
        softcap=max((call.softcap for call in calls if call.softcap is not None), default=None),
        has_sinks=any(call.sinks_H is not None for call in calls),
        has_alibi=tuple(call.slopes_H is not None for call in calls),
        kv_source=kv_source,
        features_refusal=features_refusal,
        encoder_head_dim=of_encoder[0].query.shape[3] if of_encoder else None,
    )


def _own_calls(
    calls: list[AttentionCall], of_encoder: list[AttentionCall], parts: EncoderDecoderParts, kept: Tensor
) -> list[AttentionCall]:
    """The decoder's calls over its own tokens.  Unsupported if a cross attention, or the encoder, asks for what is unknown.

    kept: each layer's keys and values of a text that was read, [layers, S, 2, K, D].
    """
    cross = [call for call in calls if parts.is_cross(call)]
    if [call.module.layer_idx for call in cross] != list(range(len(parts.layers))):
        raise Unsupported("every decoder layer must read the encoder's output once, through the attention interface")
    own = [call for call in calls if not parts.is_cross(call)]
    if len({call.query.shape[1::2] for call in calls}) > 1 or {call.key.shape[1::2] for call in own} != {kept.shape[3:]}:
        raise Unsupported("cross attention must have the heads of the decoder's own attention")
    for call in (*cross, *of_encoder):
        passed = [name for name, value in call.extra.items() if value is not None and name not in (*_HARMLESS, "dropout")]
        if passed or call.sinks_H is not None or (call.sliding_window is not None and call not in of_encoder):
            raise Unsupported(f"the encoder's attention, or attention to it, is more than a softmax of products: {passed}")
        if getattr(call.module, "is_causal", False):
            raise Unsupported("the encoder's attention, or attention to it, is causal; expected it to read every token")
    return own


def _check_calls(calls: list[AttentionCall], parts: ModelParts) -> None:
    order = [getattr(call.module, "layer_idx", None) for call in calls]
    if order != list(range(len(parts.layers))):
        silent = [layer for layer in range(len(parts.layers)) if layer not in order]
        what = f"layers {silent} never attend" if silent else f"layers attend in the order {order}"
        raise Unsupported(f"every decoder layer must attend once, through the attention interface, but {what}")
    shapes = {(call.query.shape[1], *call.key.shape[1::2], call.value.shape[3]) for call in calls}
    if len(shapes) > 1:
        raise Unsupported(
            "all layers must have the same heads, because a cache has one shape for all layers; got (query heads, kv heads, "
            f"key dim, value dim) = {sorted(shapes)}"
        )
    for layer, call in enumerate(calls):
        if call.module not in set(parts.layers[layer].modules()):
            raise Unsupported(f"attention {layer} is not part of decoder layer {layer}")
        if not getattr(call.module, "is_causal", True) or call.extra.get("is_causal") is False:
            raise Unsupported(f"layer {layer} is not causal: it reads tokens after its own; expected a decoder-only model")
        passed = {name: value for name, value in call.extra.items() if value is not None}
        if passed.get("is_causal") is True:
            del passed["is_causal"]
        if not passed.get("dropout"):
            passed.pop("dropout", None)
        unknown = [name for name in passed if name not in _HARMLESS]
        if unknown:
            raise Unsupported(f"layer {layer} passes {', '.join(unknown)} to attention, which specdec does not compute")


def _kv_source(calls: list[AttentionCall]) -> tuple[int, ...]:
    """For each layer, the layer whose keys and values it reads.

    Whatever the names in a model's code are, a layer that shares keys and values hands attention the very tensors that an
    earlier layer handed it.
    """
    sources: list[int] = []
    for layer, call in enumerate(calls):
        keys, values = (
            next(earlier for earlier, other in enumerate(calls) if getattr(other, name) is getattr(call, name))
            for name in ("key", "value")
        )
        if keys != values:
            raise Unsupported(
                f"layer {layer} reads the keys of layer {keys} and the values of layer {values}; expected both of one layer"
            )
        sources.append(keys)
    return tuple(sources)


def _features_refusal(hidden: Tensor, states: dict[int, Tensor]) -> str:
    """Why layer outputs can't be a draft head's features: they must be one vector a token, as wide as the hidden state."""
    odd = sorted({tuple(state.shape) for state in states.values()} - {(1, *hidden.shape)})
    if not odd:
        return ""
    return (
        f"its layers hand on tensors of shape {odd[0]} for {TOKENS} tokens, expected {(1, *hidden.shape)}; which parts "
        "are a token's feature is not known"
    )


def _check_logits(logits: Tensor, config: Any) -> None:
    if logits.shape != (TOKENS, config.vocab_size):
        raise Unsupported(f"logits must be vocab_size = {config.vocab_size} wide, got {tuple(logits.shape)}")
