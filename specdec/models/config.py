"""A Hugging Face config.json of the Llama family, read strictly into what our modules need.

A key that would change the computation and that we don't compute is an error, never a warning.  This module knows no weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.attention.kinds import FULL, LayerKind
from specdec.checks import distinct, store
from specdec.models.checkpoints.config_values import (
    MOST_LAYERS,
    MOST_POSITIONS,
    NotComputedHere,
    dtype_name,
    flag,
    number,
    token_ids,
    whole,
)
from specdec.models.checkpoints.mistaken import file_hint, folder_hint
from specdec.models.keys.rope import all_rope_keys, rope_type
from specdec.models.kv_source import KEY, parse_kv_source
from specdec.models.schemes.config import SIDECAR, quantization_of, read_sidecar
from specdec.models.schemes.rules import Quantization
from specdec.parallel.shard import Shard

WINDOWED = "sliding_attention"  # in a config's layer_types
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mimo")
QWEN2 = ("qwen2", "mimo")  # MiMo's own layers are Qwen2's
MTP_COUNT = "num_nextn_predict_layers"  # the key that says how many layers of multi-token prediction a checkpoint has


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: theta, and Llama-3.1's or a linear scaling (`kind`: default | linear | llama3).

    rotated: how many values of a head are turned, where not all are; 0: all.  They lie as `ops.rope.by_halves` says.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: float = 8192
    rotated: int = 0


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder in front of a decoder.

    max_tokens: the longest text that it reads.
    start_ids: the tokens that the decoder's text begins with; no prompt says them.
    head_dim: of the encoder's own attention.
    """

    max_tokens: int
    start_ids: tuple[int, ...]
    head_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder.  Counts are in heads, layers and hidden units.

    value_width: of a value head where that is not head_dim; 0: it is.
    layer_kinds: which keys each layer reads; left out: all full.  softcap, has_sinks: whether any layer has them.
    kv_source: for each layer, the layer whose keys and values it reads: its own number, or that of an earlier layer, which
        then stores its own; left out: every layer stores its own.
    features_refusal: why the outputs of this model's layers can't be a draft head's features; empty if they can.
    max_position_why: what of the config sets max_position.  has_experts: a router chooses among experts.
    quantization: how matrices are stored in 8 or 4 bits; None: all of them are ordinary numbers.
    eos_ids: those that end a text.  ends_by_file: what each file names as ends, that which transformers' generate reads first.
    encoder: of an encoder-decoder model, in which every layer reads the encoder's output too; else None.
    mtp_layers: layers of multi-token prediction in the checkpoint, which the target itself does not compute.
    shard: which rank's share of the model this is; the counts of heads and intermediate_size are then that share's.
    kv_copies: how many neighbouring ranks hold the same key/value heads.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position: int = 2048
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_kinds: tuple[LayerKind, ...] = ()
    kv_source: tuple[int, ...] = ()
    features_refusal: str = ""
    softcap: float | None = None
    has_sinks: bool = False
    eos_ids: tuple[int, ...] = ()
    ends_by_file: tuple[tuple[str, tuple[int, ...]], ...] = ()
    dtype: str | None = None
    max_position_why: str = "max_position_embeddings"
    has_experts: bool = False
    value_width: int = 0
    encoder: EncoderConfig | None = None
    mtp_layers: int = 0
    quantization: Quantization | None = None
    shard: Shard = Shard()
    kv_copies: int = 1

    def __post_init__(self) -> None:
        if set(self.layer_kinds) <= {FULL}:  # a copy of another config may have another number of layers
            store(self, layer_kinds=(FULL,) * self.num_layers)
        assert len(self.layer_kinds) == self.num_layers, (self.layer_kinds, self.num_layers)
        if self.kv_source == tuple(range(len(self.kv_source))):  # the same holds here
            store(self, kv_source=tuple(range(self.num_layers)))
        assert len(self.kv_source) == self.num_layers, (self.kv_source, self.num_layers)

    @property
    def first_sharing_layer(self) -> int:
        """The first layer of the model's end in which no layer stores keys and values; num_layers if the last one does."""
        return max(self.kv_source) + 1

    def first_of_rows(self, aux_layers: Sequence[int]) -> int:
        """The first layer that needs only the rows of a pass that somebody reads; num_layers or more if there is none.

        No layer from there on stores keys and values, nor is its output captured (aux_layers) for all tokens.
        """
        return max(self.first_sharing_layer, *(layer + 1 for layer in aux_layers), 0)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.  ValueError, with the path, if there is none, or if one of its keys stands there twice."""
    if not path.is_file():
        hint = folder_hint(path.parent)
        raise ValueError(f"{path} does not exist; expected a Hugging Face model folder holding {path.name}{hint}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=distinct)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:  # a ValueError also for a number of thousands of digits
        hint = file_hint(path)
        raise ValueError(f"{path} is not valid JSON: {error}{hint and '; '}{hint}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def read_target_json(folder: Path) -> dict[str, Any]:
    """A target's config.json, with what ModelOpt's older files say of weights beside it, in hf_quant_config.json.

    ValueError if both say something and contradict each other.
    """
    path, beside = folder / "config.json", folder / SIDECAR
    raw = read_json(path)
    if beside.is_file() and (scheme := read_sidecar(read_json(beside), raw, str(beside), str(path))) is not None:
        raw["quantization_config"] = scheme
    return raw


_ROPE_KEYS = {  # what each type needs: the config's key, our name
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
}
_ROPE_KNOWN = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_ROPE_KEYS["llama3"]}


def parse_rope(raw: dict[str, Any], where: str = "config.json") -> RopeConfig:
    """Rope settings as transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) writes them."""
    merged = all_rope_keys(raw, where)
    kind = rope_type(merged, where)
    if kind not in _ROPE_KEYS:
        raise NotComputedHere(
            f"{where}: rope type must be default, linear or llama3, got {kind!r} (rope_type): no native module computes it yet"
        )
    if unknown := sorted(set(merged) - _ROPE_KNOWN):
        raise ValueError(
            f"{where}: unknown rope keys {', '.join(unknown)} in rope_parameters or rope_scaling; they may change the model"
        )
    wanted = _ROPE_KEYS[kind]
    missing = [key for key in wanted if merged.get(key) is None]
    if missing:
        raise ValueError(f"{where}: rope type {kind!r} needs {', '.join(missing)} in rope_parameters (or rope_scaling)")
    numbers: dict[str, Any] = {name: number(merged, key, where) for key, name in wanted.items()}
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise ValueError(
            f"{where}: high_freq_factor must be above low_freq_factor, got {numbers['high_freq_factor']:g} and "
            f"{numbers['low_freq_factor']:g}"
        )
    return RopeConfig(theta=number(merged, "rope_theta", where, RopeConfig.theta), kind=kind, **numbers)


def parse_config(raw: dict[str, Any], where: str) -> ModelConfig:
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
    missing = [key for key in _REQUIRED if raw.get(key) is None]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    layers = whole(raw, "num_hidden_layers", where, most=MOST_LAYERS)
    hidden, intermediate, heads, vocab_size = (whole(raw, key, where) for key in _REQUIRED if key != "num_hidden_layers")
    kv_heads = whole(raw, "num_key_value_heads", where, heads)
    head_dim = whole(raw, "head_dim", where, 128 if family == "qwen3" else hidden // heads, least=0)
    if heads % kv_heads:
        raise ValueError(f"{where}: num_attention_heads must be a multiple of num_key_value_heads, got {heads}, {kv_heads}")
    if head_dim % 2 or not head_dim:
        own = "" if raw.get("head_dim") is not None else ", which is hidden_size / num_attention_heads where it is absent"
        raise ValueError(f"{where}: head_dim must be even and above 0 for rotary embeddings, got {head_dim}{own}")
    for key in ("max_sequence_length", "pretraining_tp"):  # not read, but a config with such sizes is broken
        whole(raw, key, where, 1)
    attention_bias, mlp_bias = (_bias(raw, key, family, where) for key in _BIASED)
    kinds = _layer_kinds(raw, family, where)
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=number(raw, "rms_norm_eps", where, 1e-6),
        rope=parse_rope(raw, where),
        max_position=whole(raw, "max_position_embeddings", where, 2048, most=MOST_POSITIONS),
        tie_embeddings=flag(raw, "tie_word_embeddings", where),
        qkv_bias=attention_bias or family in QWEN2,
        o_bias=attention_bias and family in ("llama", "qwen3"),
        mlp_bias=mlp_bias,
        qk_norm=family == "qwen3",
        layer_kinds=kinds,
        kv_source=parse_kv_source(raw, kinds, where),
        eos_ids=token_ids(raw, "eos_token_id", where, vocab_size),
        dtype=dtype_name(raw, where),
        mtp_layers=whole(raw, MTP_COUNT, where, 0, least=0, most=MOST_LAYERS),
        quantization=quantization_of(raw, where),
    )


def refuse_unknown(raw: dict[str, Any], known: frozenset[str], where: str) -> None:
    """ValueError if the config holds a key nobody here has read about."""
    if unknown := sorted(key for key in raw if key not in known and not key.startswith("_")):
        raise NotComputedHere(f"{where}: unknown config keys {', '.join(unknown)}; they may change what the model computes")


# Read above, or known not to change what a forward pass computes.
NATIVE_KEYS = frozenset(
    "architectures attention_bias attention_dropout auto_map bos_token_id compression_config do_sample dtype eos_token_id "
    "head_dim hidden_act hidden_size initializer_range intermediate_size layer_types max_length max_position_embeddings "
    "max_sequence_length max_window_layers mlp_bias model_max_length model_type num_attention_heads num_hidden_layers "
    "num_key_value_heads output_attentions output_hidden_states pad_token_id partial_rotary_factor pretraining_tp "
    "quantization_config return_dict rms_norm_eps rope_parameters rope_scaling rope_theta sep_token_id sliding_window "
    "temperature tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers_version unk_token_id "
    "unsloth_fixed unsloth_version use_bfloat16 use_cache use_sliding_window vocab_size".split()
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
        expected = _alternating(count, first, window)
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
    if WINDOWED in types and window is None:
        raise ValueError(
            f"{where}: layer_types has {WINDOWED}, but no sliding_window is switched on, got use_sliding_window "
            f"{raw.get('use_sliding_window')} and sliding_window {raw.get('sliding_window')}; nearest thing that works: "
            "use_sliding_window true with a sliding_window, or no layer_types"
        )
    return tuple(LayerKind(window=window) if kind == WINDOWED else FULL for kind in types)


def _refuse_window(raw: dict[str, Any], where: str) -> None:
    """ValueError for a window in a Llama, which transformers' forward pass reads past, and its cache obeys.

    A window that no text outgrows says nothing.
    """
    window = raw.get("sliding_window")
    if window is not None and window < whole(raw, "max_position_embeddings", where, 2048, most=MOST_POSITIONS):
        raise ValueError(
            f"{where}: sliding_window must be null or absent in a llama model, got {window}: transformers' layers read all "
            "keys there, while its cache drops those before the window; nearest things that work: no sliding_window (all "
            "keys), or model_type 'mistral' (the window)"
        )


def check_types(types: Any, count: int, where: str) -> None:
    """ValueError if layer_types is no list of so many kinds that are known."""
    message = f"{where}: layer_types must be {count} of full_attention or {WINDOWED}, got {types!r}"
    if not isinstance(types, list) or len(types) != count or not all(isinstance(kind, str) for kind in types):
        raise ValueError(message)
    if set(types) - {"full_attention", WINDOWED}:
        raise NotComputedHere(message)


def _alternating(count: int, first: int, window: int | None) -> list[str]:
    """Qwen's layers, of which those from `first` on are windowed."""
    return [WINDOWED if window is not None and layer >= first else "full_attention" for layer in range(count)]


def sliding_window(raw: dict[str, Any], where: str) -> int | None:
    """The window of a config whose layers use one: absent, transformers takes 4096; null: none."""
    window = raw.get("sliding_window", 4096)
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"{where}: sliding_window must be a positive number of tokens or null, got {window!r}")
    return None if window is None else whole({"sliding_window": window}, "sliding_window", where)
