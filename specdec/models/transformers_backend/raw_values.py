"""Values of a config.json that no model can have, refused by key before transformers' code computes from them.

transformers' own classes check most types, but few values: sizes below 1, numbers that would take all memory or hours, and
rotary settings end as errors from deep inside, or never.  Reads no weights.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from specdec.models.checkpoints.config_values import (
    MAX_INTEGER,
    MAX_LAYERS,
    MAX_POSITIONS,
    dtype_name,
    mapping,
    number,
    shown,
    text,
    whole,
)
from specdec.models.keys.shared import sliding_window
from specdec.models.schemes.config import KEYS

# The greatest value of each size by transformers' common name; families that use another name say so in their attribute_map.
_SIZES = {
    "hidden_size": MAX_INTEGER,
    "intermediate_size": MAX_INTEGER,
    "num_hidden_layers": MAX_LAYERS,
    "num_attention_heads": MAX_INTEGER,
    "num_key_value_heads": MAX_INTEGER,
    "head_dim": MAX_INTEGER,
    "vocab_size": MAX_INTEGER,
    "max_position_embeddings": MAX_POSITIONS,
    "attention_chunk_size": MAX_INTEGER,
}
_ROPE_NUMBERS = ("rope_theta", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor")


def refuse_values(raw: dict[str, Any], where: str) -> None:
    """ValueError names `where`, the key, what was expected and what was found.  raw: of a type that transformers knows."""
    made = CONFIG_MAPPING[raw["model_type"]]()
    sizes = {**_SIZES, **{made.attribute_map[key]: most for key, most in _SIZES.items() if key in made.attribute_map}}
    for key, most in sizes.items():
        if not isinstance(raw.get(key), list):  # a number for each layer is transformers' to judge
            whole(raw, key, where, 1, most=most)
    for common, own in made.attribute_map.items():  # transformers checks the type of its own name alone
        if common in raw and raw[common] is None and getattr(made, own) is not None:
            raise ValueError(f"{where}: {common} must not be null: it stands for {own} in a {raw['model_type']} model")
    for key, default in made.to_dict().items():
        if key in raw and key not in (*sizes, "sliding_window") and not key.endswith("token_id"):
            _refuse_number(raw, key, where, default)
    sliding_window(raw, where)
    dtype_name(raw, where)
    for key in KEYS:
        if (scheme := raw.get(key)) is not None:
            raise ValueError(
                f"{where}: {key} must be absent: specdec's own modules read weights of 8 or 4 bits, not transformers' code; "
                f"got {scheme!r}; nearest: backend='auto', where specdec has a module of its own for the model, or its "
                "checkpoint in bfloat16"
            )
    for key in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        if (act := text(raw, key, where)) is not None and act not in ACT2FN:
            raise ValueError(f"{where}: {key} must be an activation that transformers knows, such as 'silu', got {act!r}")
    types = raw.get("layer_types")
    if types is not None and not (isinstance(types, list) and types and all(isinstance(kind, str) for kind in types)):
        raise ValueError(f"{where}: layer_types must be null or a list with the name of each layer's type, got {types!r}")
    pad, vocab_size = raw.get("pad_token_id"), raw.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocab_size, int) and pad >= vocab_size:
        raise ValueError(f"{where}: pad_token_id must be below vocab_size {vocab_size}, got {shown(pad)}")
    if raw.get("partial_rotary_factor") is not None:
        number(raw, "partial_rotary_factor", where)
    for key in ("rope_parameters", "rope_scaling"):
        parameters = mapping(raw, key, where)
        _refuse_rope(parameters, f"{where}: {key}")
        for name in parameters:
            if isinstance(parameters[name], dict):  # of one type of layers
                _refuse_rope(parameters[name], f"{where}: {key}.{name}")


def _refuse_number(raw: dict[str, Any], key: str, where: str, default: Any) -> None:
    """Counts and norms' epsilons below 0, probabilities that are none, and numbers that are infinite or NaN."""
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(default, int) and not isinstance(default, bool) and default >= 0 and isinstance(value, int):
        whole(raw, key, where, least=0)
    elif key.endswith(("eps", "epsilon")):
        number(raw, key, where, or_zero=True)
    elif key.endswith(("dropout", "pdrop")) and not 0 <= value <= 1:
        raise ValueError(f"{where}: {key} must be from 0 to 1, got {value!r}")
    elif not (abs(value) <= MAX_INTEGER**8 and math.isfinite(value)):
        raise ValueError(f"{where}: {key} must be a finite number, got {value!r}")


def _refuse_rope(parameters: dict[str, Any], where: str) -> None:
    """Every number in it is finite and not negative; which types there are is transformers' to say: some have older names."""
    for key in parameters.keys() & {"rope_type", "type"}:
        if not isinstance(parameters[key], str) or not parameters[key]:
            raise ValueError(f"{where}: {key} must be the name of a rope type, such as 'default', got {parameters[key]!r}")
    for key, value in parameters.items():
        if key == "rope_theta" or (key in _ROPE_NUMBERS and value is not None):
            number(parameters, key, where)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number(parameters, key, where, or_zero=True)
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"{where}: {key} must be at most {MAX_INTEGER}, got {shown(value)}")
