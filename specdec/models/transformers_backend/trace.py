"""What a transformers model asks of attention, learnt by running it once without weights, on torch's `meta` device.

That says more than a config does: which layers attend at all, how often, with which heads, windows and sinks; and a model that
reads the device from the host can't run there, as it could not inside a CUDA graph.  Refuses what our attention is not.

Shapes: T tokens, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec.models.checkpoints.config_values import one_line
from specdec.models.transformers_backend.attention import NAME, AttentionCall, answering
from specdec.models.transformers_backend.experts import EXPERTS
from specdec.models.transformers_backend.parts import Parts, Unsupported

TOKENS = 3
# Arguments of attention that change nothing here, whatever they hold: the pass's own settings, and what is applied already.
_HARMLESS = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "dropout", "layer_idx",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "kernel_options", "training",
}  # fmt: skip


class Trace(NamedTuple):
    """sliding_windows: what each layer passes.  softcap: the largest of any layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    sliding_windows: tuple[int | None, ...]
    softcap: float | None
    has_sinks: bool


def trace(config: Any, where: str) -> Trace:
    """Runs the model of that transformers config.  ValueError names `where` and what of it can't run here."""
    calls: list[AttentionCall] = []
    states: dict[int, Tensor] = {}

    def record(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.value.new_empty((1, TOKENS, call.query.shape[1], call.value.shape[3]))

    try:
        with torch.device("meta"), torch.no_grad(), answering(record):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=NAME, experts_implementation=EXPERTS, dtype=torch.bfloat16
            ).eval()
            parts = Parts(model)
            parts.on_layers(lambda layer, state: states.update({layer: state}))
            hidden = parts.hidden(torch.zeros(TOKENS, dtype=torch.long), torch.arange(TOKENS))
            logits = parts.logits(hidden)
        _check_calls(calls, parts)
        _check_shapes(hidden, states, logits, config)
    except Unsupported as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # of any kind: the code is the model's own
        own = "has attention of its own" if isinstance(error, KeyError) and NAME in error.args else "can't run without values"
        raise ValueError(
            f"{where}: the code of {config.model_type} models {own} ({type(error).__name__}: {one_line(error)}); expected a "
            "family whose layers call transformers' attention interface, and which reads nothing on the host, such as a Llama"
        ) from error
    first = calls[0]
    return Trace(
        num_heads=first.query.shape[1],
        num_kv_heads=first.key.shape[1],
        head_dim=first.key.shape[3],
        hidden_size=hidden.shape[-1],
        sliding_windows=tuple(call.sliding_window for call in calls),
        softcap=max((call.softcap for call in calls if call.softcap is not None), default=None),
        has_sinks=any(call.sinks_H is not None for call in calls),
    )


def _check_calls(calls: list[AttentionCall], parts: Parts) -> None:
    order = [getattr(call.module, "layer_idx", None) for call in calls]
    if order != list(range(len(parts.layers))):
        silent = [layer for layer in range(len(parts.layers)) if layer not in order]
        what = f"layers {silent} never attend" if silent else f"layers attend in the order {order}"
        raise Unsupported(f"every decoder layer must attend once, through the attention interface, but {what}")
    shapes = {(call.query.shape[1], *call.key.shape[1::2], call.value.shape[3]) for call in calls}
    if len(shapes) > 1 or any(key_dim != value_dim for *_, key_dim, value_dim in shapes):
        raise Unsupported(
            "all layers must have the same heads, and keys and values the same head_dim; got (query heads, kv heads, key dim, "
            f"value dim) = {sorted(shapes)}"
        )
    for layer, call in enumerate(calls):
        if call.module not in set(parts.layers[layer].modules()):
            raise Unsupported(f"attention {layer} is not part of decoder layer {layer}")
        if not getattr(call.module, "is_causal", True) or call.extra.get("is_causal") is False:
            raise Unsupported(f"layer {layer} is not causal: it reads tokens after its own; expected a decoder-only model")
        odd = [k for k, v in call.extra.items() if v is not None and k not in _HARMLESS and (k, v) != ("is_causal", True)]
        if odd or call.extra.get("dropout"):
            raise Unsupported(f"layer {layer} passes {', '.join(odd or ['dropout'])} to attention, which is not computed here")


def _check_shapes(hidden: Tensor, states: dict[int, Tensor], logits: Tensor, config: Any) -> None:
    widths = {tuple(state.shape) for state in states.values()}
    if widths != {(1, *hidden.shape)}:
        raise Unsupported(f"every layer's output must be as wide as the final hidden state {tuple(hidden.shape)}, got {widths}")
    if logits.shape != (TOKENS, config.vocab_size):
        raise Unsupported(f"logits must be vocab_size = {config.vocab_size} wide, got {tuple(logits.shape)}")
