"""The config.json of the Llama family (Llama, Mistral, Qwen2, Qwen3, MiMo), read strictly into what our modules need.

A key that would change the computation and that we don't compute is an error, never a warning.  This module knows no weights.
"""

from __future__ import annotations

from typing import Any

from specdec.attention.kinds import LayerKind
from specdec.models.checkpoints.config_values import MAX_LAYERS, MAX_POSITIONS, NotComputedHere, flag, whole
from specdec.models.config import ModelConfig
from specdec.models.keys.rope import parse_rope
from specdec.models.keys.shared import (
    MTP_COUNT,
    NATIVE_KEYS,
    WINDOWED,
    check_heads,
    check_types,
    refuse_unknown,
    require,
    shared_values,
    sliding_window,
    windowed_from,
    windowed_kinds,
)
from specdec.models.kv_source import KEY, parse_kv_source
from specdec.models.schemes.config import quantization_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mimo")
QWEN2 = ("qwen2", "mimo")  # MiMo's own layers are Qwen2's


def parse_llama(raw: dict[str, Any], where: str) -> ModelConfig:
    """A target's config.  ValueError names `where`, the key, what was expected and what was found."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{where}: model_type must be one of {', '.join(FAMILIES)}, got {family!r}")
    if (act := raw.get("hidden_act", "silu")) != "silu":
        kind = NotComputedHere if isinstance(act, str) else ValueError
        raise kind(f"{where}: hidden_act must be 'silu', got {act!r}")
    refuse_unknown(raw, NATIVE_KEYS | {KEY} | (_MIMO_KEYS if family == "mimo" else frozenset()), where)
    if flag(raw, "use_mrope", where):
        raise NotComputedHere(f"{where}: use_mrope must be false: no native module turns heads by several positions")
    require(raw, _REQUIRED, where)
    layers = whole(raw, "num_hidden_layers", where, most=MAX_LAYERS)
    hidden, intermediate, heads, vocab_size = (whole(raw, key, where) for key in _REQUIRED if key != "num_hidden_layers")
    kv_heads = whole(raw, "num_key_value_heads", where, heads)
    head_dim = whole(raw, "head_dim", where, 128 if family == "qwen3" else hidden // heads, least=0)
    check_heads(heads, kv_heads, where)
    if head_dim % 2 or not head_dim:
        own = "" if raw.get("head_dim") is not None else ", which is hidden_size / num_attention_heads where it is absent"
        raise ValueError(f"{where}: head_dim must be even and above 0 for rotary embeddings, got {head_dim}{own}")
    for key in ("max_sequence_length", "pretraining_tp"):  # not read, but a config with such sizes is broken
        whole(raw, key, where, 1)
    attention_bias, mlp_bias = (_bias(raw, key, family, where) for key in _BIASED)
    kinds = _layer_kinds(raw, family, where)
    return ModelConfig(
        **shared_values(raw, where, vocab_size, eps=1e-6, positions=2048),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=parse_rope(raw, where),
        qkv_bias=attention_bias or family in QWEN2,
        o_bias=attention_bias and family in ("llama", "qwen3"),
        mlp_bias=mlp_bias,
        qk_norm=family == "qwen3",
        layer_kinds=kinds,
        kv_source=parse_kv_source(raw, kinds, where),
        mtp_layers=whole(raw, MTP_COUNT, where, 0, least=0, most=MAX_LAYERS),
        quantization=quantization_of(raw, where),
    )


_MIMO_KEYS = frozenset({MTP_COUNT, "use_mrope"})
# Families whose layers in transformers may have these biases.
_BIASED = {"attention_bias": ("llama", "qwen3", *QWEN2), "mlp_bias": ("llama",)}
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def _bias(raw: dict[str, Any], key: str, family: str, where: str) -> bool:
    """Whether matrices have biases.  ValueError in a family whose class of transformers passes the key over, and has none."""
    if (has := flag(raw, key, where)) and family not in _BIASED[key]:
        raise ValueError(
            f"{where}: {key} must be false or absent in a {family} model, whose layers in transformers have no such biases, "
            f"got true; nearest thing that works: no {key}, or a model_type that has them ({', '.join(_BIASED[key])})"
        )
    return has


def _layer_kinds(raw: dict[str, Any], family: str, where: str) -> tuple[LayerKind, ...]:
    """What each layer reads, by the rules of transformers' own class of the family."""
    count, types = raw["num_hidden_layers"], raw.get("layer_types")
    is_qwen = family in (*QWEN2, "qwen3")
    window = sliding_window(raw, where)  # read in every family, so that a broken value is refused in every one
    is_on = flag(raw, "use_sliding_window", where)
    first = whole({"max_window_layers": 28, **raw}, "max_window_layers", where, 28 if not is_qwen else None, least=0)
    if family == "llama" and types is None:
        _refuse_window(raw, where)
    if not (family == "mistral" or is_qwen and is_on):  # Qwen ships the number with a switch that turns it off
        window = None
    if is_qwen:
        expected = windowed_from(first, count, window)
    else:
        expected = [WINDOWED if window else "full_attention"] * count
    if types is None:
        types = expected
    else:
        check_types(types, count, where)
    if not is_qwen and types != expected:
        raise ValueError(
            f"{where}: a {family} model's layers are all alike ({expected[0]}, by sliding_window {raw.get('sliding_window')}), "
            f"got layer_types {types}; nearest thing that works: no layer_types"
        )
    return windowed_kinds(types, window, raw, where)


def _refuse_window(raw: dict[str, Any], where: str) -> None:
    """ValueError for a window in a Llama, which transformers' forward pass reads past, and its cache obeys.

    A window that no text outgrows says nothing.
    """
    window = raw.get("sliding_window")
    if window is not None and window < whole(raw, "max_position_embeddings", where, 2048, most=MAX_POSITIONS):
        raise ValueError(
            f"{where}: sliding_window must be null or absent in a llama model, got {window}: transformers' layers read all "
            "keys there, while its cache drops those before the window; nearest things that work: no sliding_window (all "
            "keys), or model_type 'mistral' (the window)"
        )
