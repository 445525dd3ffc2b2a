"""Keys of BLOOM's, MPT's and Falcon's config.json that transformers' code does not read, although other code does.

Published configs hold them.  Where a key has the value that means what transformers computes, the key is passed over; any other
value is refused by name.  Reads no weights.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

from specdec.models.checkpoints.config_values import MAX_POSITIONS, mapping, number, whole
from specdec.models.keys.shared import NATIVE_KEYS

# Of each family: keys that change no forward pass, whatever their values are, beyond those of all families.
HARMLESS: dict[str, frozenset[str]] = {
    "bloom": frozenset(
        "attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion n_embed n_inner offset_alibi seq_length "
        "skip_bias_add skip_bias_add_qkv".split()
    ),
    "mpt": frozenset("init_config tokenizer_name verbose".split()),
    "falcon": frozenset("apply_residual_connection_post_layernorm n_embed".split()),
}
# Of each family: values of keys without which transformers' code would compute something else than the config says.
_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "bloom": {"slow_but_exact": (False,)},
    "mpt": {
        "expansion_ratio": (4,),
        "logit_scale": (None,),
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
    },
    "falcon": {"apply_residual_connection_post_layernorm": (False,)},
}
_ONLY_IN_ATTENTION = {  # the same of MPT's attn_config
    "alibi": (True,),
    "attn_type": ("multihead_attention",),
    "attn_uses_sequence_id": (False,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}
# Keys by which other families say what they compute.  None of these families' code reads one that is not in its class.
_OTHERS = (
    "attention_bias head_dim hidden_act intermediate_size layer_types max_position_embeddings max_window_layers mlp_bias "
    "num_key_value_heads partial_rotary_factor rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window "
    "use_sliding_window".split()
)
_NOT_NULL = ("activation", "attention_dropout", "hidden_dropout", "layer_norm_epsilon")  # Falcon's class lets null pass
_LONGEST = {"bloom": "seq_length", "mpt": "max_seq_len"}  # keys that say how long a text may be
_FRACTIONS = ("clip_qkv", "softmax_scale")  # of MPT's attn_config: numbers that transformers' class takes as floats alone


def refuse_unread(raw: dict[str, Any], where: str) -> None:
    """ValueError names `where`, the key, what was expected and what was found.  raw: of a type that transformers knows."""
    name = raw["model_type"]
    if name not in HARMLESS:
        return
    _only(raw, _ONLY[name], where, name)
    if (longest := longest_key(name)) is not None:
        whole(raw, longest, where, 1, most=MAX_POSITIONS)
    if "n_embed" in HARMLESS[name] and raw.get("n_embed") is not None:  # an older name of hidden_size
        whole(raw, "n_embed", where)
    made = CONFIG_MAPPING[name]()
    _check_twice(raw, made.attribute_map, where)
    _check_heads(raw, made, where)
    read = {*made.to_dict(), *made.attribute_map, *(("rope_scaling", "rope_theta") if name == "falcon" else ())}
    if odd := [key for key in _OTHERS if key not in read and raw.get(key) is not None]:
        raise ValueError(f"{where}: keys {', '.join(odd)} must be absent: transformers does not read them for a {name} model")
    if name == "bloom":
        _check_inner(raw, where)
    if name == "mpt":
        _check_attention(mapping(raw, "attn_config", where), f"{where}: attn_config")
    if name == "falcon":
        _check_falcon(raw, where)


def as_transformers_reads(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with numbers of the types that transformers' class wants: published MPT configs say clip_qkv 6, it wants 6.0.

    raw: what `refuse_unread` has passed.
    """
    own = raw.get("attn_config") if raw["model_type"] == "mpt" else None
    if own is None:
        return raw
    return raw | {"attn_config": own | {key: float(own[key]) for key in _FRACTIONS if own.get(key) is not None}}


def longest_key(model_type: str) -> str | None:
    """The key that says how long a text of such a model may be; None: it is everybody's max_position_embeddings."""
    return _LONGEST.get(model_type)


def _check_twice(raw: dict[str, Any], names: dict[str, str], where: str) -> None:
    """A size under the family's name and under transformers' common one: tensors do not tell how many heads there are."""
    for common, own in {**names, "hidden_size": names.get("hidden_size", "n_embed")}.items():
        if None not in (raw.get(common), raw.get(own)) and raw[common] != raw[own]:
            raise ValueError(f"{where}: {own} and {common} must be equal, got {raw[own]!r} and {raw[common]!r}")


def _only(raw: dict[str, Any], values: dict[str, tuple[Any, ...]], where: str, name: str) -> None:
    for key, allowed in values.items():
        if key in raw and not any(
            raw[key] is value or (raw[key] == value and type(raw[key]) is type(value)) for value in allowed
        ):
            raise ValueError(
                f"{where}: {key} must be {' or '.join(map(repr, allowed))} in a {name} model, got {raw[key]!r}: transformers' "
                "code, which runs it, computes nothing else"
            )


def _check_inner(raw: dict[str, Any], where: str) -> None:
    width = raw.get("n_embed") or raw.get("hidden_size")
    if raw.get("n_inner") is not None and raw["n_inner"] != 4 * (width or 64):
        raise ValueError(f"{where}: n_inner must be null or 4 times the hidden size, got {raw['n_inner']!r}")


def _check_attention(own: dict[str, Any], where: str) -> None:
    known = {*CONFIG_MAPPING["mpt"]().attn_config.to_dict(), *NATIVE_KEYS}
    if odd := sorted(key for key in own if key not in known and not key.startswith("_")):
        raise ValueError(f"{where}: unknown keys {', '.join(odd)}, which transformers does not read for an mpt model")
    _only(own, _ONLY_IN_ATTENTION, where, "mpt")
    for key in ("alibi_bias_max", *_FRACTIONS):
        if key in own and (own[key] is not None or key == "alibi_bias_max"):
            number(own, key, where)
    if number(own, "attn_pdrop", where, 0.0, or_zero=True) > 1:
        raise ValueError(f"{where}: attn_pdrop must be from 0 to 1, got {own['attn_pdrop']!r}")


def _check_heads(raw: dict[str, Any], made: Any, where: str) -> None:
    """Heads share the hidden size evenly.  made: transformers' config of the family with its defaults."""
    (width_key, width), (heads_key, heads) = (
        _size(raw, made, where, *names) for names in (("hidden_size", "n_embed"), ("num_attention_heads",))
    )
    if width % heads:
        raise ValueError(f"{where}: {width_key} must be a multiple of {heads_key} {heads}, got {width}")


def _size(raw: dict[str, Any], made: Any, where: str, common: str, *older: str) -> tuple[str, int]:
    """The name under which a config says a size, and the size; the class's default if the config does not say it."""
    own = made.attribute_map.get(common, common)
    name = next((key for key in (own, common, *older) if raw.get(key) is not None), own)
    return name, whole(raw, name, where, getattr(made, own))


def _check_falcon(raw: dict[str, Any], where: str) -> None:
    """What Falcon's code can't run, and what it would ignore.

    Without groups of heads, every head has a key of its own, or all have one: num_kv_heads says nothing else.
    """
    is_new, heads = bool(raw.get("new_decoder_architecture")), whole(raw, "num_attention_heads", where, 71)
    if nulls := [key for key in _NOT_NULL if key in raw and raw[key] is None]:
        raise ValueError(f"{where}: {', '.join(nulls)} must not be null in a falcon model")
    norms = raw.get("num_ln_in_parallel_attn")
    if norms is not None and whole(raw, "num_ln_in_parallel_attn", where, most=2) == 2 and not is_new:
        raise ValueError(f"{where}: num_ln_in_parallel_attn must be null or 1 unless new_decoder_architecture is true, got 2")
    if is_new and not raw.get("parallel_attn", True):
        raise ValueError(
            f"{where}: parallel_attn must be absent or true where new_decoder_architecture is, got {raw['parallel_attn']!r}"
        )
    if raw.get("num_kv_heads") is None:
        return
    kv_heads = whole(raw, "num_kv_heads", where)
    if is_new:
        if heads % kv_heads:
            raise ValueError(f"{where}: num_attention_heads {heads} must be a multiple of num_kv_heads, got {kv_heads}")
    elif not raw.get("multi_query", True) and kv_heads != heads:
        raise ValueError(
            f"{where}: num_kv_heads must be num_attention_heads {heads} where multi_query is false, got {kv_heads}"
        )
