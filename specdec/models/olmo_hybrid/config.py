"""The config.json of OLMo Hybrid, read strictly.

Three of four layers keep a state in place of keys; the fourth is ordinary attention.  What a key that is absent means is what
transformers' class means, but for rope: released checkpoints say null, and were trained without any.  This module knows no
weights.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from specdec.attention.kinds import FULL, RECURRENT, LayerKind
from specdec.models.checkpoints.config_values import NotComputedHere, flag, mapping, number, whole
from specdec.models.config import NO_ROPE, ModelConfig, OutputNames, RopeConfig
from specdec.models.keys.shared import check_types
from specdec.models.mixtures.keys import read_decoder
from specdec.models.recurrent.sizes import RecurrentConfig, RuleSizes

LINEAR = "linear_attention"  # in a config's layer_types
_MADE = "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min"  # how weights were made
_KEYS = (
    "attention_bias layer_types linear_allow_neg_eigval linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads "
    f"linear_num_value_heads linear_value_head_dim {_MADE}"
)


@dataclass(frozen=True)
class OlmoHybridConfig(ModelConfig):
    """strongest: what the strength of a token is at most; see `gated_delta.Gates`."""

    strongest: float = 1.0


def parse_olmo_hybrid(raw: dict[str, Any], where: str) -> OlmoHybridConfig:
    """A target's config.  ValueError names `where` (the file), the key, what was expected and what was found."""
    said, turns = dict(raw), _turns(raw, where)
    if not turns:
        said |= {"rope_parameters": None}
    if said.get("num_key_value_heads") is None and said.get("num_attention_heads") is not None:
        said["num_key_value_heads"] = said["num_attention_heads"]
    config = read_decoder(said, where, _KEYS, positions=65536)
    for key in _MADE.split():
        number(said, key, where, 0.0, or_zero=True)
    biased = flag(said, "attention_bias", where)
    config = replace(
        config, qkv_bias=biased, o_bias=biased, norms_all_heads=True, layer_kinds=_layer_kinds(said, config.num_layers, where),
        recurrent=_recurrent(said, config, where), rope=config.rope if turns else RopeConfig(kind=NO_ROPE),
        output_names=OutputNames(recurrent="linear_attn.o_proj"),
    )  # fmt: skip
    own = {each.name: getattr(config, each.name) for each in fields(ModelConfig)}
    return OlmoHybridConfig(**own, strongest=2.0 if flag(said, "linear_allow_neg_eigval", where, True) else 1.0)


def _turns(raw: dict[str, Any], where: str) -> bool:
    """Whether positions turn queries and keys: where a file says so, in whatever words."""
    parameters = mapping(raw, "rope_parameters", where)
    if raw.get("rope_scaling") is not None or raw.get("rope_theta") is not None:
        return True
    if parameters.get("rope_theta") is None and set(parameters) <= {"rope_type", "type", "rope_theta"}:
        return parameters.get("rope_type", parameters.get("type", "default")) != "default"
    return True


def _layer_kinds(said: dict[str, Any], count: int, where: str) -> tuple[LayerKind, ...]:
    """By layer_types, or else every fourth layer is of attention, or the last one of fewer than four."""
    types = said.get("layer_types")
    if types is None:
        types = ["full_attention" if layer % 4 == 3 else LINEAR for layer in range(count)]
        types = types if count > 3 else [*types[:-1], "full_attention"]
    check_types(types, count, where, LINEAR)
    if len(set(types)) == 1:
        raise NotComputedHere(f"{where}: layers must be of both kinds, by layer_types, got {count} of {types[0]}")
    return tuple(RECURRENT if kind == LINEAR else FULL for kind in types)


def _recurrent(said: dict[str, Any], config: ModelConfig, where: str) -> RecurrentConfig:
    key_heads, value_heads = (whole(said, f"linear_num_{kind}_heads", where, config.num_heads) for kind in ("key", "value"))
    if value_heads % key_heads:
        raise ValueError(
            f"{where}: linear_num_value_heads must be a multiple of linear_num_key_heads, got {value_heads}, {key_heads}"
        )
    key_width = whole(said, "linear_key_head_dim", where, int(0.75 * config.hidden_size / key_heads))
    value_width = whole(said, "linear_value_head_dim", where, 2 * key_width)
    taps = whole(said, "linear_conv_kernel_dim", where, 4, least=2)
    return RecurrentConfig(taps, RuleSizes(key_heads, value_heads, key_width, value_width, in_blocks=True))
