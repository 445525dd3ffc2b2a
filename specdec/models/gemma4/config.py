"""The config.json of Gemma 4's text models, as published and as transformers saves it, read strictly.  Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from specdec.attention.kinds import FULL
from specdec.models.checkpoints.config_values import NotComputedHere, flag, mapping, number, whole
from specdec.models.config import PROPORTIONAL, HeadSizes, ModelConfig, RopeConfig
from specdec.models.keys.names import by_own_names, with_unsaid
from specdec.models.keys.rope import parse_rope, rope_type
from specdec.models.keys.shared import WINDOWED, check_heads, check_types, require, windowed_kinds
from specdec.models.mixtures.keys import TOP_K, only, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.experts import GeGLU
from specdec.ops.products.routing import RouterRule

FULL_TYPE = "full_attention"
ACTIVATION = "gelu_pytorch_tanh"
_ROPES: dict[str, dict[str, Any]] = {  # where rope_parameters are absent
    WINDOWED: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL_TYPE: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"}  # of the type proportional
_KEYS = (
    "attention_bias attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim hidden_activation "
    "hidden_size_per_layer_input layer_types moe_intermediate_size num_experts num_global_key_value_heads "
    "num_kv_shared_layers per_layer_config sliding_window top_k_experts use_bidirectional_attention use_double_wide_mlp "
    "vocab_size_per_layer_input"
)
_BY_LAYER = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}  # in per_layer_config


@dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """double_wide: whether MLPs of layers that read an earlier layer's keys are twice as wide.
    final_softcap: c, where logits become c * tanh(logit / c); None: they stay.
    """

    double_wide: bool = False
    final_softcap: float | None = None

    def mlp_width(self, layer: int) -> int:
        """Of that layer's ordinary MLP, which stands beside a mixture where there is one."""
        width = self.intermediate_size if self.experts is None else self.experts.shared_size
        return width * (1 + (self.double_wide and self.kv_source[layer] != layer))

    @property
    def width_of_mlp(self) -> float:
        chosen = 0 if self.experts is None else self.experts.router.top_k * self.experts.intermediate_size
        return chosen + sum(map(self.mlp_width, range(self.num_layers))) / self.num_layers


def parse_gemma4(raw: dict[str, Any], where: str) -> GemmaConfig:
    """ValueError names `where` (the file), the key, what was expected and what was found."""
    raw = with_unsaid(by_own_names(raw, {TOP_K: "top_k_experts"}, where), {"tie_word_embeddings": True})
    raw = with_unsaid(raw, {"num_key_value_heads": 4, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0})
    only(raw, where, hidden_activation=ACTIVATION, hidden_act=ACTIVATION, rope_theta=None, rope_scaling=None)
    only(raw, where, partial_rotary_factor=None, use_bidirectional_attention="vision")  # of images alone
    plain = {key: value for key, value in raw.items() if key not in ("rope_parameters", "hidden_act")}
    base = read_decoder(plain, where, _KEYS, positions=131072, head_dim=256)
    layers = base.num_layers
    types = _types(raw, layers, where)
    kinds = windowed_kinds(types, whole(raw, "sliding_window", where, 512), raw, where)
    ropes = mapping(raw, "rope_parameters", where) or _ROPES
    if unknown := sorted(set(ropes) - set(_ROPES)):
        raise ValueError(f"{where}: rope_parameters must hold {' and '.join(_ROPES)}, got {', '.join(unknown)}")
    shared = replace(base, attention_scale=1.0, rope=_rope(ropes, WINDOWED, where)).heads
    biased = flag(raw, "attention_bias", where)
    config = GemmaConfig(
        **{
            **{each.name: getattr(base, each.name) for each in fields(base)},
            "layer_kinds": kinds,
            "rope": shared.rope,
            "attention_scale": 1.0,
            "unlike_heads": ((FULL, _full_heads(raw, shared, types, ropes, where)),),
            "kv_source": _kv_source(whole(raw, "num_kv_shared_layers", where, least=0), types, where),
            "qkv_bias": biased,
            "o_bias": biased,
            "qk_norm": True,
            "embedding_multiplier": base.hidden_size**0.5,
            "input_size": _input_size(raw, base.vocab_size, where),
        },
        double_wide=flag(raw, "use_double_wide_mlp", where),
        final_softcap=None if raw.get("final_logit_softcapping") is None else number(raw, "final_logit_softcapping", where),
    )
    if not flag(raw, "enable_moe_block", where):
        return config
    require(raw, ["num_experts", "top_k_experts", "moe_intermediate_size"], where)
    count, top_k, width = (whole(raw, key, where) for key in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    rule = RouterRule(top_k, "softmax", normed=True)
    experts = ExpertsConfig(count, width, rule, activation=GeGLU(), kept_float32=True, shared_size=config.intermediate_size)
    mixed = with_experts(config, experts, where, "num_experts", "top_k_experts")
    assert isinstance(mixed, GemmaConfig)
    return mixed


def _types(raw: dict[str, Any], layers: int, where: str) -> list[str]:
    """layer_types; absent: each sixth layer is full.  The last one has to be, and transformers would make it so."""
    types = raw.get("layer_types")
    if types is None:
        types = [WINDOWED if (layer + 1) % 6 else FULL_TYPE for layer in range(layers)]
        types[-1] = FULL_TYPE
    check_types(types, layers, where)
    if types[-1] != FULL_TYPE:
        raise ValueError(f"{where}: layer_types must end in {FULL_TYPE}, which transformers takes the last layer for")
    return list(types)


def _kv_source(count: int, types: list[str], where: str) -> tuple[int, ...]:
    """Of the last `count` layers, the last layer of the same type before them."""
    first = len(types) - count
    missing = set(types) - set(types[: max(0, first)])
    if count and missing:
        raise ValueError(
            f"{where}: num_kv_shared_layers must leave a layer of each type that stores its own keys and values, got {count} "
            f"of {len(types)} layers, which leave no {' and no '.join(sorted(missing))}"
        )
    own = range(first)
    return tuple(layer if layer < first else max(i for i in own if types[i] == types[layer]) for layer in range(len(types)))


def _full_heads(
    raw: dict[str, Any], shared: HeadSizes, types: list[str], ropes: dict[str, Any], where: str
) -> HeadSizes:  # fmt: skip
    """The heads of full layers, by global_head_dim and num_global_key_value_heads, or by per_layer_config."""
    alike = flag(raw, "attention_k_eq_v", where)
    if raw.get("per_layer_config") is None:
        head_dim = whole(raw, "global_head_dim", where, 512)
        said = whole(raw, "num_global_key_value_heads", where, shared.num_kv_heads)
        kv_heads = said if alike else shared.num_kv_heads
    else:
        sizes = _by_layer(raw, types, where)
        head_dim = whole(sizes, "head_dim", f"{where}: per_layer_config", shared.head_dim)
        kv_heads = whole(sizes, "num_key_value_heads", f"{where}: per_layer_config", shared.num_kv_heads)
    check_heads(shared.num_heads, kv_heads, f"{where}: {FULL_TYPE} (num_global_key_value_heads)")
    if head_dim % 2:
        raise ValueError(f"{where}: global_head_dim must be even for rotary embeddings, got {head_dim}")
    rope = _rope(ropes, FULL_TYPE, where)
    return replace(shared, num_kv_heads=kv_heads, head_dim=head_dim, rope=rope, values_are_keys=alike)


def _by_layer(raw: dict[str, Any], types: list[str], where: str) -> dict[str, Any]:
    """What per_layer_config says of full layers, whose other sizes are those of all layers.

    ValueError unless it says the same of each of them, and of no other layer, or if the published keys say something else.
    """
    said = mapping(raw, "per_layer_config", where)
    full = {str(layer) for layer, kind in enumerate(types) if kind == FULL_TYPE}
    sizes: Any = next(iter(said.values()), {})
    is_sound = isinstance(sizes, dict) and set(sizes) <= set(_BY_LAYER) and all(each == sizes for each in said.values())
    if not is_sound or set(said) != (full if said else set()):
        raise NotComputedHere(
            f"{where}: per_layer_config must hold the same head_dim and num_key_value_heads of all full layers, and of no "
            f"other, got {said!r}"[:500]
        )
    for key, other in _BY_LAYER.items():
        if raw.get(other) is not None and raw[other] != sizes.get(key, raw.get(key)):
            raise ValueError(f"{where}: {other} must be {sizes.get(key)}, as in per_layer_config, or absent, got {raw[other]}")
    return dict(sizes)


def _rope(ropes: dict[str, Any], kind: str, where: str) -> RopeConfig:
    """The rotation of layers of that type."""
    said, where = mapping(ropes, kind, f"{where}: rope_parameters"), f"{where}: rope_parameters of {kind}"
    require(said, ["rope_theta"], where)
    if rope_type(said, where) != PROPORTIONAL:
        return parse_rope({"rope_parameters": said}, where)
    if unknown := sorted(set(said) - _ROPE_KEYS):
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}; they may change the model")
    theta, factor = number(said, "rope_theta", where), number(said, "factor", where, 1.0)
    share = number(said, "partial_rotary_factor", where, 1.0, or_zero=True)
    if share > 1:
        raise ValueError(f"{where}: partial_rotary_factor must be at most 1, got {share:g}")
    return RopeConfig(theta, PROPORTIONAL, factor, share=share)


def _input_size(raw: dict[str, Any], vocab_size: int, where: str) -> int:
    size = whole(raw, "hidden_size_per_layer_input", where, least=0)
    rows = whole(raw, "vocab_size_per_layer_input", where, 262144, least=0)
    if size and rows != vocab_size:
        raise ValueError(f"{where}: vocab_size_per_layer_input must be vocab_size {vocab_size}, got {rows}")
    return size
