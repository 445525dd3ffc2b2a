"""The config.json of Granite 4's hybrids, read strictly.

Most layers are Mamba-2's, some are ordinary attention; below each lie a shared MLP and, if there are experts, a mixture.  What
a key that is absent means is what transformers' class means.  This module knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.attention.kinds import FULL, RECURRENT, LayerKind
from specdec.models.checkpoints.config_values import NotComputedHere, flag, number, text, whole
from specdec.models.config import NO_ROPE, OutputNames, RopeConfig
from specdec.models.keys.names import by_own_names, with_unsaid
from specdec.models.keys.shared import check_types
from specdec.models.mamba.config import KEYS, MambaConfig, read_mamba
from specdec.models.mixtures.keys import TOP_K, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.routing import RouterRule

LINEAR = "linear_attention"  # in a config's layer_types; published files say mamba, and attention for full_attention
_WORDS = {"mamba": LINEAR, "attention": "full_attention"}
_MULTIPLIERS = "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"
_KEYS = (
    f"{KEYS} {' '.join(_MULTIPLIERS)} attention_bias layer_types normalization_function num_local_experts "
    "position_embedding_type shared_intermediate_size"
)


@dataclass(frozen=True)
class GraniteConfig(MambaConfig):
    """attention_scale: the factor of products of queries and keys.  residual_multiplier: of what each block adds."""

    attention_scale: float = 1.0
    residual_multiplier: float = 1.0


def parse_granite_hybrid(raw: dict[str, Any], where: str) -> GraniteConfig:
    """A target's config.  ValueError names `where` (the file), the key, what was expected and what was found."""
    raw = by_own_names(raw, {"layers_block_type": "layer_types", "num_experts": "num_local_experts"}, where)
    said = with_unsaid(raw, {"num_key_value_heads": raw.get("num_attention_heads"), "intermediate_size": 11008})
    if (kind := text(raw, "normalization_function", where)) not in (None, "rmsnorm"):
        raise NotComputedHere(f"{where}: normalization_function must be 'rmsnorm' or absent, got {kind!r}")
    base = read_decoder(said, where, _KEYS, positions=2048)
    recurrent, biases = read_mamba(raw, where)
    biased, turned = flag(raw, "attention_bias", where), _position_type(raw, where) == "rope"
    scale, embeddings, divisor, residual = (number(raw, key, where, 1.0) for key in _MULTIPLIERS)
    shared = whole(raw, "shared_intermediate_size", where, 1024)
    fields = {
        **vars(base), **biases, "out_bias": biases["in_bias"], "qkv_bias": biased, "o_bias": biased,
        "rope": base.rope if turned else RopeConfig(kind=NO_ROPE),
        "output_names": OutputNames(mlp="shared_mlp.output_linear", recurrent="mamba.out_proj"),
        "embedding_multiplier": embeddings, "logits_divisor": divisor, "attention_scale": scale,
        "residual_multiplier": residual, "recurrent": recurrent, "layer_kinds": _layer_kinds(raw, base.num_layers, where),
    }  # fmt: skip
    count = whole(raw, "num_local_experts", where, 8, least=0)
    if not count:
        return GraniteConfig(**{**fields, "intermediate_size": shared})
    rule = RouterRule(whole(raw, TOP_K, where, 2), "softmax of chosen")
    experts = ExpertsConfig(count, base.intermediate_size, rule, shared_size=shared)
    config = with_experts(GraniteConfig(**fields), experts, where, "num_local_experts")
    assert isinstance(config, GraniteConfig)
    return config


def _position_type(raw: dict[str, Any], where: str) -> str | None:
    """Of position_embedding_type: what is no rope is nothing."""
    if (kind := text(raw, "position_embedding_type", where)) not in (None, "nope", "rope"):
        raise NotComputedHere(f"{where}: position_embedding_type must be 'rope', 'nope' or null, got {kind!r}")
    return kind


def _layer_kinds(raw: dict[str, Any], count: int, where: str) -> tuple[LayerKind, ...]:
    """By layer_types, in either way to write them; all are Mamba-2's where it is absent."""
    types = raw.get("layer_types")
    types = [LINEAR] * count if types is None else types
    if isinstance(types, list):
        types = [_WORDS.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    check_types(types, count, where, LINEAR)
    if "full_attention" not in types:
        raise NotComputedHere(
            f"{where}: some layers must be of attention, by layer_types, which says mamba of all {count} (as if it is absent)"
        )
    return tuple(RECURRENT if kind == LINEAR else FULL for kind in types)
