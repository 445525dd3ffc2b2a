"""The indexer's part of a config.json of DeepSeek V3.2 and GLM-5 (`glm_moe_dsa`), read strictly.

The indexer of a layer chooses which keys each of the layer's queries reads.  Both families have the same indexer, but for how
it pairs rotated values; GLM-5.2 also lets most layers reuse the choice of an earlier layer.  This file knows no weights.
"""

from __future__ import annotations

from typing import Any

from specdec.models.checkpoints.config_values import flag, whole
from specdec.models.config import IndexerConfig

SPARSE = ("deepseek_v32", "glm_moe_dsa")
REQUIRED = ("index_n_heads", "index_head_dim", "index_topk")
SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")  # GLM's keys
_LETTERS = {"F": "full", "S": "shared"}


def parse_indexer(raw: dict[str, Any], layers: int, rope_dim: int, where: str) -> IndexerConfig:
    """ValueError names `where` (the file), the key, what was expected and what was found."""
    heads, head_dim, topk = (whole(raw, key, where) for key in REQUIRED)
    if head_dim < rope_dim:
        raise ValueError(
            f"{where}: index_head_dim must be at least qk_rope_head_dim {rope_dim}, since so many of its values are rotated, "
            f"got {head_dim}"
        )
    _check_layer_types(raw, layers, where)
    is_glm = raw["model_type"] == "glm_moe_dsa"
    if flag(raw, "indexer_rope_interleave", where, is_glm) != is_glm:  # transformers ignores this key
        raise ValueError(
            f"{where}: indexer_rope_interleave must be {is_glm} for a {raw['model_type']} model, got {not is_glm}: its indexer "
            f"pairs rotated values {'side by side' if is_glm else 'by halves'}"
        )
    sources = _sources(_indexer_types(raw, layers, where)) if is_glm else tuple(range(layers))
    return IndexerConfig(heads, head_dim, topk, is_glm, sources)


def first_dense_layers(raw: dict[str, Any], layers: int, where: str) -> int:
    """How many layers come before the first with experts, by first_k_dense_replace, by mlp_layer_types, or by both."""
    types, key = raw.get("mlp_layer_types"), "first_k_dense_replace"
    if types is None:
        return whole(raw, key, where, least=0)
    _check_names(types, layers, ("dense", "sparse"), "mlp_layer_types", where)
    count = types.index("sparse") if "sparse" in types else layers
    if "dense" in types[count:]:
        raise ValueError(
            f"{where}: mlp_layer_types must name the dense layers before all sparse ones, got 'dense' after 'sparse'"
        )
    if raw.get(key) is not None and min(whole(raw, key, where, least=0), layers) != count:
        raise ValueError(f"{where}: {key} is {raw[key]}, but mlp_layer_types begins with {count} dense layers")
    return count


def _check_layer_types(raw: dict[str, Any], layers: int, where: str) -> None:
    types = raw.get("layer_types")
    if types is not None:
        _check_names(types, layers, ("indexed_attention",), "layer_types", where)


def _indexer_types(raw: dict[str, Any], layers: int, where: str) -> list[str]:
    """ "full" or "shared" for each layer: by name, by a pattern of letters, or by a rule, as transformers reads them."""
    types, pattern = raw.get("indexer_types"), raw.get("index_topk_pattern")
    if isinstance(pattern, str) and not set(pattern) - set(_LETTERS):
        pattern = [_LETTERS[letter] for letter in pattern]
    if pattern is not None:
        _check_names(pattern, layers, ("full", "shared"), "index_topk_pattern", where)
    every = whole(raw, "index_topk_freq", where, 1)
    offset = whole(raw, "index_skip_topk_offset", where, 2, least=0)
    ruled = pattern or ["full" if max(layer - offset + 1, 0) % every == 0 else "shared" for layer in range(layers)]
    if types is None:
        types = ruled
    _check_names(types, layers, ("full", "shared"), "indexer_types", where)
    if types != ruled and any(raw.get(key) is not None for key in SHARING[1:]):
        given = ", ".join(key for key in SHARING[1:] if raw.get(key) is not None)
        raise ValueError(f"{where}: indexer_types must be what {given} says, got {types}")
    if types[0] != "full":
        raise ValueError(f"{where}: indexer_types must begin with 'full': the first layer has no choice to share, got {types}")
    return types


def _sources(types: list[str]) -> tuple[int, ...]:
    """For each layer, the last layer up to it that has an indexer."""
    sources: list[int] = []
    for layer, kind in enumerate(types):
        sources.append(layer if kind == "full" else sources[-1])
    return tuple(sources)


def _check_names(names: Any, count: int, allowed: tuple[str, ...], key: str, where: str) -> None:
    if not isinstance(names, list) or len(names) != count or any(name not in allowed for name in names):
        raise ValueError(
            f"{where}: {key} must be a list of {' or '.join(map(repr, allowed))} for each layer, got {names!r}"[:500]
        )
