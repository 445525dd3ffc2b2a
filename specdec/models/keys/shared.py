"""Keys of a config.json that several families have, and what is read of them alike.  Knows no family."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec.attention.kinds import FULL, LayerKind
from specdec.models.checkpoints.config_values import (
    MAX_POSITIONS,
    NotComputedHere,
    dtype_name,
    flag,
    number,
    token_ids,
    whole,
)

WINDOWED = "sliding_attention"  # in a config's layer_types
MTP_COUNT = "num_nextn_predict_layers"  # the key that says how many layers of multi-token prediction a checkpoint has
# Read by the Llama family, or known not to change what a forward pass computes.
NATIVE_KEYS = frozenset(
    "architectures attention_bias attention_dropout auto_map bos_token_id compression_config do_sample dtype eos_token_id "
    "head_dim hidden_act hidden_size initializer_range intermediate_size layer_types max_length max_position_embeddings "
    "max_sequence_length max_window_layers mlp_bias model_max_length model_type num_attention_heads num_hidden_layers "
    "num_key_value_heads output_attentions output_hidden_states pad_token_id partial_rotary_factor pretraining_tp "
    "quantization_config return_dict rms_norm_eps rope_parameters rope_scaling rope_theta sep_token_id sliding_window "
    "temperature tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers_version unk_token_id "
    "unsloth_fixed unsloth_version use_bfloat16 use_cache use_sliding_window vocab_size".split()
)

# Keys that transformers 4 wrote into every config, those within others too, and that say nothing of a forward pass.
EVERYWHERE = frozenset(
    "add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size "
    "decoder_start_token_id diversity_penalty early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty "
    "finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id length_penalty "
    "min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix problem_type "
    "pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens task_specific_params "
    "tf_legacy_loss tie_encoder_decoder typical_p".split()
)


def require(raw: dict[str, Any], keys: Iterable[str], where: str) -> None:
    """ValueError names the keys that are absent or null."""
    if missing := [key for key in keys if raw.get(key) is None]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")


def shared_values(raw: dict[str, Any], where: str, vocab_size: int, eps: float, positions: int) -> dict[str, Any]:
    """Fields of a ModelConfig that every family reads alike.  eps, positions: what the family means by not saying them."""
    return dict(
        family=raw["model_type"],
        vocab_size=vocab_size,
        rms_norm_eps=number(raw, "rms_norm_eps", where, eps),
        max_position=whole(raw, "max_position_embeddings", where, positions, most=MAX_POSITIONS),
        tie_embeddings=flag(raw, "tie_word_embeddings", where),
        eos_ids=token_ids(raw, "eos_token_id", where, vocab_size),
        dtype=dtype_name(raw, where),
    )


def check_heads(heads: int, kv_heads: int, where: str) -> None:
    """ValueError unless each key/value head serves as many query heads."""
    if heads % kv_heads:
        raise ValueError(f"{where}: num_attention_heads must be a multiple of num_key_value_heads, got {heads}, {kv_heads}")


def refuse_unknown(raw: dict[str, Any], known: frozenset[str], where: str) -> None:
    """ValueError if the config holds a key nobody here has read about."""
    if unknown := sorted(key for key in raw if key not in known and not key.startswith("_")):
        raise NotComputedHere(f"{where}: unknown config keys {', '.join(unknown)}; they may change what the model computes")


def check_types(types: Any, count: int, where: str, other: str = WINDOWED) -> None:
    """ValueError if layer_types is no list of so many kinds that are known.  other: the kind beside full_attention."""
    message = f"{where}: layer_types must be {count} of full_attention or {other}"
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"{message}, got {types!r}"[:500])
    if len(types) != count:
        raise ValueError(
            f"{message}, by num_hidden_layers, got {len(types)} of them; nearest thing that works: both as the weights "
            "have layers"
        )
    if unknown := set(types) - {"full_attention", other}:
        raise NotComputedHere(f"{message}, got {', '.join(sorted(unknown))}"[:500])


def windowed_from(first: int, count: int, window: int | None) -> list[str]:
    """layer_types of so many layers, of which those from `first` on have the window, if there is one."""
    return [WINDOWED if window is not None and layer >= first else "full_attention" for layer in range(count)]


def windowed_kinds(types: list[str], window: int | None, raw: dict[str, Any], where: str) -> tuple[LayerKind, ...]:
    """The kinds of layers whose types `check_types` has checked.  ValueError if some have a window, and there is none."""
    if WINDOWED in types and window is None:
        said = [f"{key} {raw[key]}" for key in ("use_sliding_window", "sliding_window") if key in raw]
        raise ValueError(
            f"{where}: layer_types has {WINDOWED}, but no sliding_window is switched on, got {' and '.join(said) or 'none'}; "
            "nearest thing that works: a sliding_window, and use_sliding_window true where the family has it; or no layer_types"
        )
    return tuple(LayerKind(window=window) if kind == WINDOWED else FULL for kind in types)


def sliding_window(raw: dict[str, Any], where: str) -> int | None:
    """The window of a config whose layers use one: absent, transformers takes 4096; null: none."""
    window = raw.get("sliding_window", 4096)
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"{where}: sliding_window must be a positive number of tokens or null, got {window!r}")
    return None if window is None else whole({"sliding_window": window}, "sliding_window", where)
