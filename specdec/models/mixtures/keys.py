"""Keys of a config.json that decoders with mixtures and ordinary heads have in common, read strictly.  Knows no family.

A key that would change the computation and that is not computed is an error that names it.  What a family means by a key that
is absent is what its class in transformers means.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from specdec.models.checkpoints.config_values import MAX_LAYERS, NotComputedHere, number, whole
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.keys.rope import rope_keys
from specdec.models.keys.shared import NATIVE_KEYS, check_heads, refuse_unknown, require, shared_values
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.schemes.config import quantization_of
from specdec.models.yarn import parse_rope_with_yarn

TOP_K = "num_experts_per_tok"
_BY_FAMILY = "attention_bias layer_types max_window_layers mlp_bias sliding_window use_sliding_window".split()
# Read here, or known not to change what a forward pass computes.
_COMMON = NATIVE_KEYS - {*_BY_FAMILY} | {TOP_K, "output_router_logits", "router_aux_loss_coef"}
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")


def read_decoder(
    raw: dict[str, Any], where: str, keys: str, *, eps: float = 1e-6, positions: int, theta: float = 10000.0,
    head_dim: int | None = None, rotated: float | None = None,
) -> ModelConfig:  # fmt: skip
    """What is common to these families, as a config without experts and biases.

    keys: those that the family reads besides.  eps to rotated: what the family means by not saying them; rotated: which part of
    a head is turned, None: the whole, whatever the file says.
    ValueError names `where` (the file), the key, what was expected and what was found.
    """
    refuse_unknown(raw, _COMMON | {*keys.split()}, where)
    if (act := raw.get("hidden_act", "silu")) != "silu":
        kind = NotComputedHere if isinstance(act, str) else ValueError
        raise kind(f"{where}: hidden_act must be 'silu', got {act!r}")
    require(raw, _REQUIRED, where)
    hidden, heads, kv_heads, vocab_size = (whole(raw, key, where) for key in _REQUIRED if key != "num_hidden_layers")
    check_heads(heads, kv_heads, where)
    if raw.get("head_dim") is None and head_dim is None and (hidden < heads or hidden // heads % 2):
        expected = "hidden_size / num_attention_heads must be an even number where head_dim is absent"
        raise ValueError(f"{where}: {expected}, got {hidden} / {heads}")
    width = whole(raw, "head_dim", where, hidden // heads if head_dim is None else head_dim)
    if width % 2:
        raise ValueError(f"{where}: head_dim must be even for rotary embeddings, got {width}")
    return ModelConfig(
        **shared_values(raw, where, vocab_size, eps, positions),
        hidden_size=hidden,
        intermediate_size=whole(raw, "intermediate_size", where),
        num_layers=whole(raw, "num_hidden_layers", where, most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        rope=read_rope(raw, where, width, theta, rotated),
        quantization=quantization_of(raw, where),
    )


def read_rope(raw: dict[str, Any], where: str, head_dim: int, theta: float, share: float | None) -> RopeConfig:
    """The rotary settings of heads of which a part may be turned.  theta, share: where the config says neither."""
    inside = rope_keys(raw, where)
    said = [part["partial_rotary_factor"] for part in (inside, raw) if part.get("partial_rotary_factor") is not None]
    asked = number({"partial_rotary_factor": (said or [1.0 if share is None else share])[0]}, "partial_rotary_factor", where)
    if share is None and asked != 1:
        raise NotComputedHere(f"{where}: partial_rotary_factor must be 1 or absent in this family, got {asked:g}")
    share, rotated = asked, int(head_dim * asked)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise ValueError(
            f"{where}: partial_rotary_factor must rotate an even number of the {head_dim} values of a head, got {share:g}"
        )
    plain = {key: value for key, value in raw.items() if key != "partial_rotary_factor"}
    for key in ("rope_parameters", "rope_scaling"):
        if plain.get(key):
            plain[key] = {name: value for name, value in plain[key].items() if name != "partial_rotary_factor"}
    if inside.get("rope_theta") is None and "rope_theta" not in inside and raw.get("rope_theta") is None:
        plain["rope_theta"] = theta
    rope = parse_rope_with_yarn(plain, where)
    return rope if rotated == head_dim else replace(rope, rotated=rotated)


def with_experts(
    config: ModelConfig, experts: ExpertsConfig, where: str, count_key: str, top_key: str = TOP_K
) -> ModelConfig:  # fmt: skip
    """The config with that mixture, unless all layers are dense.  count_key, top_key: what the file calls these numbers."""
    if experts.router.top_k > experts.count:
        raise ValueError(f"{where}: {top_key} must be at most {count_key} {experts.count}, got {experts.router.top_k}")
    if experts.dense_layers >= set(range(config.num_layers)):
        return config
    return replace(config, experts=experts, has_experts=True)


def layer_numbers(raw: dict[str, Any], key: str, layers: int, where: str) -> frozenset[int]:
    """A list of layers' numbers, which count from 0; none where it is absent."""
    value = [] if raw.get(key) is None else raw[key]
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise ValueError(f"{where}: {key} must be null or a list of layers' numbers, got {value!r}"[:500])
    own = [each for each in value if 0 <= each < layers]
    if own != value:
        expected = f"{key} must hold numbers of layers from 0 to {layers - 1}, by num_hidden_layers {layers}"
        raise ValueError(f"{where}: {expected}, got {value!r}"[:500] + f"; nearest thing that works: {own!r}"[:500])
    return frozenset(value)


def dense_by_types(raw: dict[str, Any], key: str, layers: int, where: str, unsaid: Iterable[int]) -> frozenset[int]:
    """The layers that a list of "dense" and "sparse", one word for each layer, calls dense.  unsaid: where it is absent."""
    types = raw.get(key)
    if types is None:
        return frozenset(unsaid)
    if not isinstance(types, list) or len(types) != layers or any(each not in ("dense", "sparse") for each in types):
        expected = f"{key} must be a list of 'dense' or 'sparse' for each layer, {layers} by num_hidden_layers"
        raise ValueError(f"{where}: {expected}, got {types!r}"[:500])
    return frozenset(layer for layer, kind in enumerate(types) if kind == "dense")


def only(raw: dict[str, Any], where: str, **allowed: Any) -> None:
    """ValueError for a key that says anything but what is computed, or null."""
    for key, value in allowed.items():
        said = raw.get(key)
        if said is not None and (said != value or isinstance(said, bool) != isinstance(value, bool)):  # 0 == False
            raise NotComputedHere(f"{where}: {key} must be {value!r}, got {raw[key]!r}; nearest thing that works: no {key}")
