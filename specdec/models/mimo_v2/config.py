"""The config.json of MiMo-V2-Flash, in its publisher's keys and in those of transformers, read strictly.  Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specdec.models.checkpoints.config_values import MAX_LAYERS, NotComputedHere, flag, mapping, number, whole
from specdec.models.config import HeadSizes, ModelConfig
from specdec.models.deepseek.config import parse_experts
from specdec.models.keys.names import by_own_names, expect_repeated, with_unsaid
from specdec.models.keys.shared import MTP_COUNT, WINDOWED, check_heads, check_types, windowed_kinds
from specdec.models.mixtures.keys import dense_by_types, only, read_decoder, read_rope, with_experts

FULL_TYPE = "full_attention"
_THETAS = {FULL_TYPE: 5e6, WINDOWED: 1e4}  # where nothing says them, as in transformers
_ROTATED = 0.334
_SINKS = {FULL_TYPE: ("add_full_attention_sink_bias", False), WINDOWED: ("add_swa_attention_sink_bias", True)}
_ONLY: dict[str, Any] = {
    "attention_projection_layout": "split", "hybrid_block_size": 0, "n_shared_experts": 0, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}  # fmt: skip
_KEYS = (
    "add_full_attention_sink_bias add_swa_attention_sink_bias attention_bias attention_chunk_size attention_value_scale "
    "hybrid_layer_pattern layer_types mlp_layer_types moe_intermediate_size moe_layer_freq n_group n_routed_experts "
    f"norm_topk_prob routed_scaling_factor sliding_window sliding_window_size swa_head_dim swa_num_attention_heads "
    f"swa_num_key_value_heads swa_rope_theta swa_v_head_dim topk_group v_head_dim {MTP_COUNT} {' '.join(_ONLY)}"
)


@dataclass(frozen=True)
class MiMoConfig(ModelConfig):
    """value_scale: what values are multiplied with (attention_value_scale)."""

    value_scale: float = 1.0


def parse_mimo_v2(raw: dict[str, Any], where: str) -> MiMoConfig:
    """ValueError names `where` (the file), the key, what was expected and what was found."""
    raw = by_own_names(raw, {"num_local_experts": "n_routed_experts", "layernorm_epsilon": "rms_norm_eps"}, where)
    raw = with_unsaid(raw, {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1})
    plain = {key: value for key, value in raw.items() if key not in ("rope_parameters", "rope_theta", "partial_rotary_factor")}
    base = read_decoder(plain, where, _KEYS, eps=1e-5, positions=131072, head_dim=192)
    only(raw, where, **_ONLY)
    types = _types(raw, base.num_layers, where)
    kinds = windowed_kinds(types, _window(raw, where), raw, where)
    full = _heads(raw, base, FULL_TYPE, where)
    windowed = _heads(raw, base, WINDOWED, where)
    biased, scale = flag(raw, "attention_bias", where), raw.get("attention_value_scale", 0.707)
    scale = 1.0 if scale is None else scale
    config = MiMoConfig(
        **{
            **{name: getattr(base, name) for name in base.__dataclass_fields__},
            **{name: getattr(full, name) for name in HeadSizes.__dataclass_fields__},
            "layer_kinds": kinds,
            "unlike_heads": tuple((kind, windowed) for kind in dict.fromkeys(kinds) if kind.window),
            "qkv_bias": biased,
            "mtp_layers": whole(raw, MTP_COUNT, where, 0, least=0, most=MAX_LAYERS),
        },
        value_scale=number({"attention_value_scale": scale}, "attention_value_scale", where),
    )
    experts = parse_experts({**raw, "n_shared_experts": 1}, where)
    experts = replace(experts, shared_size=0, dense_layers=_dense_layers(raw, base.num_layers, where))
    mixed = with_experts(config, experts, where, "n_routed_experts")
    assert isinstance(mixed, MiMoConfig)
    return mixed


def _types(raw: dict[str, Any], layers: int, where: str) -> list[str]:
    """layer_types, or hybrid_layer_pattern, in which 1 is a window; neither: full layers are the first and each sixth."""
    pattern, types = raw.get("hybrid_layer_pattern"), raw.get("layer_types")
    if pattern is not None:
        said = _by_pattern(raw, "hybrid_layer_pattern", layers, where, (FULL_TYPE, WINDOWED))
        if types not in (None, said):
            raise ValueError(
                f"{where}: layer_types must say what hybrid_layer_pattern says, got {types!r} and {pattern!r}"[:500]
            )
        types = said
    if types is None:
        types = [FULL_TYPE if layer == 0 or layer % 6 == 5 else WINDOWED for layer in range(layers)]
    check_types(types, layers, where)
    return list(types)


def _by_pattern(raw: dict[str, Any], key: str, layers: int, where: str, words: tuple[str, str]) -> list[str]:
    """A list of 0 and 1, one for each layer, in words."""
    pattern = raw[key]
    if not isinstance(pattern, list) or len(pattern) != layers or any(type(each) is not int or each >> 1 for each in pattern):
        expected = f"{key} must be a list of 0 or 1 for each layer, {layers} by num_hidden_layers"
        raise ValueError(f"{where}: {expected}, got {pattern!r}"[:500])
    return [words[each] for each in pattern]


def _dense_layers(raw: dict[str, Any], layers: int, where: str) -> frozenset[int]:
    """By moe_layer_freq, in which 1 is a mixture, or mlp_layer_types; neither: the first."""
    if raw.get("moe_layer_freq") is None:
        return dense_by_types(raw, "mlp_layer_types", layers, where, unsaid=[0])
    words = _by_pattern(raw, "moe_layer_freq", layers, where, ("dense", "sparse"))
    if raw.get("mlp_layer_types") not in (None, words):
        raise ValueError(f"{where}: mlp_layer_types must say what moe_layer_freq says, got {raw['mlp_layer_types']!r}"[:500])
    return frozenset(layer for layer, word in enumerate(words) if word == "dense")


def _window(raw: dict[str, Any], where: str) -> int:
    """Keys that a query reads, its own among them: one more than sliding_window_size, as in transformers and SGLang.

    sliding_window counts where sliding_window_size is absent; beside it both ways to count are known.
    """
    if raw.get("sliding_window_size") is None:
        window = whole(raw, "sliding_window", where, 129)
    else:
        size = whole(raw, "sliding_window_size", where)
        if whole(raw, "sliding_window", where, size) not in (size, size + 1):
            raise ValueError(
                f"{where}: sliding_window must be sliding_window_size {size}, or one more, got {raw['sliding_window']}; "
                "nearest thing that works: sliding_window_size alone"
            )
        window = size + 1
    expect_repeated(raw, "attention_chunk_size", window - (raw.get("sliding_window_size") is not None), "the window", where)
    return window


def _heads(raw: dict[str, Any], base: ModelConfig, kind: str, where: str) -> HeadSizes:
    """Of full layers, or of windowed ones, which have twice as many key/value heads where nothing says their number."""
    is_full = kind == FULL_TYPE
    prefix = "" if is_full else "swa_"
    value_width = whole(raw, "v_head_dim", where, 128)
    num_heads = whole(raw, f"{prefix}num_attention_heads", where, base.num_heads)
    kv_heads = whole(raw, f"{prefix}num_key_value_heads", where, base.num_kv_heads if is_full else 2 * base.num_kv_heads)
    check_heads(num_heads, kv_heads, f"{where}: {kind}" if is_full else f"{where}: {kind} (swa_)")
    head_dim = whole(raw, f"{prefix}head_dim", where, base.head_dim)
    value_width = whole(raw, f"{prefix}v_head_dim", where, value_width)
    if head_dim % 2:
        raise ValueError(f"{where}: {prefix}head_dim must be even for rotary embeddings, got {head_dim}")
    key, usual = _SINKS[kind]
    return HeadSizes(
        num_heads,
        kv_heads,
        head_dim,
        0 if value_width == head_dim else value_width,
        read_rope(_rope_of(raw, kind, where), where, head_dim, _THETAS[kind], _ROTATED),
        has_sinks=flag(raw, key, where, usual),
    )


def _rope_of(raw: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """What `read_rope` reads for layers of that kind: the kind's own rope_parameters, or the publisher's keys."""
    by_kind = mapping(raw, "rope_parameters", where)
    theta = raw.get("rope_theta" if kind == FULL_TYPE else "swa_rope_theta")
    outside = {"rope_theta": theta, "partial_rotary_factor": raw.get("partial_rotary_factor")}
    if raw.get("rope_scaling") is not None:
        raise NotComputedHere(f"{where}: rope_scaling must be absent or null, got {raw['rope_scaling']!r}"[:500])
    if not by_kind:
        return {key: value for key, value in outside.items() if value is not None}
    if unknown := sorted(set(by_kind) - set(_THETAS)):
        raise ValueError(f"{where}: rope_parameters must hold {' and '.join(_THETAS)}, got {', '.join(unknown)}")
    own = mapping(by_kind, kind, f"{where}: rope_parameters")
    for key, value in outside.items():
        if value is not None and own.get(key, value) != value:
            raise ValueError(f"{where}: {key} of {kind} must be {own[key]}, as in rope_parameters, or absent, got {value}")
    return {"rope_parameters": own}
