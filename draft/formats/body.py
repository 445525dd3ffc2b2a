"""What the configs of all layouts share: the sizes of a Llama or Qwen3 layer, rope, windows, and ids of the target's layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec.attention.kinds import FULL, LayerKind
from specdec.models.checkpoints.config_values import MAX_LAYERS, flag, mapping, text, whole
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.keys.rope import without_mrope
from specdec.models.keys.shared import EVERYWHERE, WINDOWED, refuse_unknown, sliding_window
from specdec.models.kv_source import KEY
from specdec.models.llama.config import parse_llama
from specdec.models.schemes.config import scheme_of
from specdec.models.yarn import parse_rope_with_yarn

ROPE_KEYS = frozenset(("rope_theta", "rope_parameters", "rope_scaling"))
_WINDOW_KEYS = frozenset(("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"))
# What transformers writes into every config, and what says nothing about a forward pass.
_HARMLESS = EVERYWHERE | {"target_model_type"}


def parse_body(
    raw: dict[str, Any], own: Iterable[str], target: ModelConfig | None, where: str, *, family: str = "llama"
) -> ModelConfig:
    """The head's own layers, without rope and windows.

    own: the keys that the layout's reader reads itself.  ValueError for any other key that is neither a Llama's nor harmless.
    """
    if KEY in raw:
        raise ValueError(f"{where}: {KEY} must be absent: each layer of a head stores its own keys and values")
    for key in ("rms_norm_eps", "max_position_embeddings"):
        if raw.get(key) is None:
            raise ValueError(f"{where} lacks {key}; expected a number")
    text(raw, "model_type", where)
    aside = {*own, *_HARMLESS, *ROPE_KEYS, *_WINDOW_KEYS}
    plain = {key: value for key, value in raw.items() if key not in aside}
    model = parse_llama({**plain, "model_type": family}, where)
    if model.quantization is not None:
        raise ValueError(
            f"{scheme_of(plain, where)[1]} must be absent: a head's own scheme stands at the top of its config.json, and its "
            f"target's says nothing of the head, got {model.quantization}; nearest thing that works: that key at the top, if "
            "the head is stored so, or none"
        )
    if target is not None and model.vocab_size != target.vocab_size:
        raise ValueError(f"{where}: vocab_size must be the target's {target.vocab_size}, got {model.vocab_size}")
    return replace(model, tie_embeddings=False)


def head_layers(
    raw: dict[str, Any],
    own: Iterable[str],
    target: ModelConfig | None,
    where: str,
    *,
    family: str = "llama",
    expected: int | None = None,
    silent: bool = False,
    by_type: bool = False,
) -> ModelConfig:
    """The head's own layers, with rope and windows.  own, silent: as of `parse_body` and `parse_head_rope`.

    expected: the only number of layers that the layout has; None: any.
    by_type: whether layer_types alone say which layers have a window; else all have one or none has.
    """
    model = parse_body(raw, own, target, where, family=family)
    count, rope = layer_count(raw, where, expected), parse_head_rope(raw, target, where, silent=silent)
    windows = windows_by_type(raw, count, where) if by_type else windows_of(raw, count, where)
    return replace(model, num_layers=count, rope=rope, layer_kinds=windows)


def check_nested(nested: Mapping[str, Any], known: Mapping[str, Sequence[Any]], where: str, name: str) -> None:
    """ValueError for a key of an object that is unknown, or that has a value which is not computed.

    known: the values of each key that are computed; empty: they are read elsewhere.
    """
    for key, value in nested.items():
        if key not in known:
            raise ValueError(f"{where}: unknown key {name}.{key}; it may change what the head computes")
        allowed = known[key]
        if allowed and not any(type(value) is type(one) and value == one for one in allowed):
            raise ValueError(f"{where}: {name}.{key} must be {' or '.join(map(str, allowed))}, got {value!r}")


def only_keys(raw: dict[str, Any], known: Iterable[str], where: str) -> None:
    """ValueError for a key that is neither known nor harmless."""
    refuse_unknown(raw, frozenset(known) | _HARMLESS, where)


def parse_head_rope(raw: dict[str, Any], target: ModelConfig | None, where: str, *, silent: bool) -> RopeConfig:
    """The head's rope.  silent: whether the layout's configs may say nothing, and so mean the target's.

    ValueError if the two spellings are both there and say different things.
    """
    raw = without_mrope(raw, where)  # heads made from a hybrid's config have its keys
    parameters, scaling = (mapping(raw, key, where) for key in ("rope_parameters", "rope_scaling"))
    if not parameters and not scaling and raw.get("rope_theta") is None:
        if not silent:
            raise ValueError(f"{where} lacks rope_theta (or rope_parameters); expected the head's own")
        return RopeConfig() if target is None else target.rope.of_whole_heads
    theta, other = raw.get("rope_theta"), parameters.get("rope_theta")
    if theta is not None and other is not None and theta != other:
        raise ValueError(f"{where}: rope_theta must be the same beside rope_parameters and in them, got {theta} and {other}")
    return parse_rope_with_yarn(raw, where)


def windows_of(raw: dict[str, Any], num_layers: int, where: str) -> tuple[LayerKind, ...]:
    """A head may have a window in all layers.  Heads made from a Qwen's config ship its switch too."""
    window = sliding_window({"sliding_window": None, **raw}, where) if flag(raw, "use_sliding_window", where, True) else None
    if raw.get("use_sliding_window") and window is None:
        raise ValueError(f"{where}: use_sliding_window is true, so sliding_window must be a number of tokens, got {window}")
    expected = [WINDOWED if window else "full_attention"] * num_layers
    if raw.get("layer_types") not in (None, expected):
        raise ValueError(f"{where}: with sliding_window {window}, layer_types must be {expected}, got {raw['layer_types']}")
    return (LayerKind(window=window),) * num_layers


def windows_by_type(raw: dict[str, Any], num_layers: int, where: str) -> tuple[LayerKind, ...]:
    """Windows of a config whose layer_types alone say which layers have one; without the key none has."""
    types, window = raw.get("layer_types"), sliding_window({"sliding_window": None, **raw}, where)
    flag(raw, "use_sliding_window", where)
    if types is None:
        return (FULL,) * num_layers
    if not isinstance(types, list) or len(types) != num_layers or any(t not in (WINDOWED, "full_attention") for t in types):
        raise ValueError(f"{where}: layer_types must be {num_layers} of full_attention or {WINDOWED}, got {types!r}")
    if WINDOWED in types and window is None:
        raise ValueError(f"{where}: layer_types has {WINDOWED}, so sliding_window must be a number of tokens, got {window}")
    return tuple(LayerKind(window=window) if kind == WINDOWED else FULL for kind in types)


def layer_count(raw: dict[str, Any], where: str, expected: int | None) -> int:
    """num_hidden_layers.  expected: the only number that the layout has; None: any."""
    count = whole(raw, "num_hidden_layers", where, most=MAX_LAYERS)
    if expected is not None and count != expected:
        raise ValueError(f"{where}: an EAGLE-3 head must have num_hidden_layers {expected}, got {count}")
    return count


def width_of_features(raw: dict[str, Any], hidden_size: int, target: ModelConfig | None, where: str) -> int:
    """target_hidden_size; absent: the head's own width."""
    width = whole(raw, "target_hidden_size", where, hidden_size)
    if target is not None and width != target.hidden_size:
        raise ValueError(f"{where}: target_hidden_size must be the target's {target.hidden_size}, got {width}")
    return width


# ---- the target's layers ----


def default_aux_layers(num_layers: int, where: str = "config.json") -> tuple[int, ...]:
    """The reference's features when a config names none: outputs of layers 1, N//2 - 1 and N - 4 (0-based)."""
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if not 0 <= layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"{where}: a target of {num_layers} layers has no default aux layers (1, N//2-1, N-4 must ascend); "
            "name them in eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    return layers


def aux_layers_of(
    ids: Any,
    target: ModelConfig | None,
    where: str,
    *,
    one_based: bool = False,
    any_order: bool = False,
    key: str = "eagle_aux_hidden_state_layer_ids",
) -> tuple[int, ...]:
    """0-based outputs of layers, ascending, from a config's list; None: the default.

    one_based: the list counts the states of a forward pass, of which the first is the embeddings'.
    any_order: whether the layout's exporter writes the list in an order that means nothing.
    Empty if the default is asked for and the target is not known.
    """
    if ids is None:
        return () if target is None else default_aux_layers(target.num_layers, where)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids) or len(set(ids)) != len(ids):
        raise ValueError(f"{where}: {key} must be a list of distinct layer numbers, got {ids!r}")
    first, most = int(one_based), MAX_LAYERS if target is None else target.num_layers - 1
    if min(ids) < first or max(ids) > most:
        state = f"; state {most + 1} is the one after the final norm, no layer's output" if one_based else ""
        raise ValueError(f"{where}: {key} must lie in [{first}, {most}], got {ids}{state}")
    if ids != sorted(ids) and not any_order:
        raise ValueError(f"{where}: {key} must ascend, as features are put side by side in the layers' order, got {ids}")
    return tuple(sorted(i - one_based for i in ids))


def check_features(target: ModelConfig | None, where: str) -> None:
    """ValueError if the outputs of the target's layers can't be features."""
    if target is not None and target.features_refusal:
        raise ValueError(
            f"{where}: an EAGLE-3 head reads the outputs of its target's layers, but of this {target.family} target "
            f"{target.features_refusal}; nearest: an EAGLE-1/2 head, which reads the final hidden state"
        )
