"""A config.json read by transformers' own classes into what loading, cache and draft need of a target.

Says by name which models can't be targets, and the nearest thing that works.  Reads no weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from specdec.attention.kinds import FULL, LayerKind
from specdec.checks import nearest_name
from specdec.models.checkpoints.config_values import MAX_LAYERS, dtype_name, one_line, token_ids, whole
from specdec.models.config import EncoderConfig, ModelConfig, RopeConfig, read_json
from specdec.models.described import described, target_json
from specdec.models.keys.ends import GENERATION, of_texts
from specdec.models.keys.names import by_own_names
from specdec.models.keys.rope import parse_rope
from specdec.models.keys.shared import MTP_COUNT, NATIVE_KEYS
from specdec.models.keys.wrapper_table import LEFT, WRAPPERS
from specdec.models.kv_source import check_shared_kinds
from specdec.models.schemes.config import SIDECAR
from specdec.models.transformers_backend.encoder_parts import ENCODER_DECODERS, decoder_config, num_decoder_layers
from specdec.models.transformers_backend.own_attention.keys import HARMLESS, as_transformers_reads, longest_key, refuse_unread
from specdec.models.transformers_backend.raw_values import refuse_values
from specdec.models.transformers_backend.trace import TracedCalls, trace

_BIASED = "adds a learnt bias for each distance to its logits"
_NO_ENCODER = {  # why encoder-decoder models of these types can't run
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers", "udop", "pix2struct", "pop2piano"), _BIASED),
    **dict.fromkeys(("whisper", "speech_to_text", "moonshine", "moonshine_streaming"), "has an encoder that reads sound"),
    **dict.fromkeys(("m2m_100", "nllb-moe"), "counts positions by which ids are padding, not by a cache"),
}
# Keys of published configs of a type that its class takes under another name, or leaves unread on purpose.
_OWN_HARMLESS_KEYS = {
    "gemma3n_text": frozenset({"altup_lr_multiplier", "query_pre_attn_scalar"}),  # of training; its attention has no scale
    "gemma4_text": frozenset({"global_head_dim", "num_global_key_value_heads"}),
    **dict.fromkeys(("glm4_moe_lite", "ernie4_5_moe", "hy_v3"), frozenset({MTP_COUNT})),
    **HARMLESS,
}
# Whose checkpoints may have layers of multi-token prediction: no part of the model, and no stray tensors.
_WITH_MTP = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "ernie4_5_moe", "hy_v3")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_HARMLESS_KEYS = frozenset(  # what published configs hold beyond their class's own keys: read under another name, or by nobody
    "activation_dropout cache_implementation experts_per_token for_llm_compressor full_attn_mod initial_context_length "
    "interpolate_factor lm_head_bias n_ctx num_experts prefix rope_local_base_freq sliding_window_pattern sliding_window_size "
    "task_specific_params".split()
    # of encoder-decoder models: settings of transformers' own generate, and switches of code that no release has any more
    + "add_bias_logits classif_dropout decoder_start_token_id early_stopping extra_pos_embeddings "
    "force_bos_token_to_be_generated forced_bos_token_id gradient_checkpointing length_penalty max_length min_length "
    "no_repeat_ngram_size normalize_embedding num_beams output_past static_position_embeddings".split()
)


def read_transformers_config(folder: Path) -> ModelConfig:
    """The target's config by transformers' rules.  ValueError names the file and what can't run here."""
    config = load_hf_config(folder)
    raw, where = target_json(folder), str(folder / "config.json")
    if keys := unknown_keys(folder):
        raise ValueError(
            f"{where}: unknown config keys {', '.join(keys)}, which transformers does not read for a {config.model_type} "
            "model; they may change what the model computes; nearest: a config.json without them, if they do not"
        )
    has_encoder = bool(getattr(config, "is_encoder_decoder", False))
    own = decoder_config(config) if has_encoder else config
    if has_encoder:
        whole({"decoder_layers": num_decoder_layers(config)}, "decoder_layers", where, most=MAX_LAYERS)
        reads = getattr(getattr(config, "encoder", config), "vocab_size", own.vocab_size)
        if reads < own.vocab_size:  # prompts are checked against the decoder's vocabulary
            raise ValueError(
                f"{where}: the encoder's vocab_size must be at least the decoder's, {own.vocab_size}, got {reads}: a prompt's "
                "token could lie outside of the encoder's table"
            )
    kinds = layer_kinds(own, where) if own is not config or not has_encoder else (FULL,) * config.decoder_layers
    traced = trace(config, where)
    most, why = _max_position(own)
    _check_windows(kinds, traced, where)
    kinds = tuple(replace(kind, alibi=alibi) for kind, alibi in zip(kinds, traced.has_alibi, strict=True))
    check_shared_kinds(kinds, traced.kv_source, where)
    return ModelConfig(
        family=config.model_type,
        hidden_size=traced.hidden_size,
        intermediate_size=_intermediate_size(own, traced),
        num_layers=len(kinds),
        num_heads=traced.num_heads,
        num_kv_heads=traced.num_kv_heads,
        head_dim=traced.head_dim,
        value_width=traced.value_dim if traced.value_dim != traced.head_dim else 0,
        vocab_size=own.vocab_size,
        rms_norm_eps=float(getattr(own, "rms_norm_eps", None) or 1e-6),
        rope=_rope(own),
        max_position=most,
        max_position_why=why,
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        layer_kinds=kinds,
        kv_source=traced.kv_source,
        features_refusal=traced.features_refusal,
        softcap=traced.softcap,
        has_sinks=traced.has_sinks,
        has_experts=any(_is_many(getattr(config, key, None)) for key in _EXPERT_COUNTS),
        eos_ids=token_ids({"eos_token_id": of_texts(raw, "eos_token_id")}, "eos_token_id", where, config.vocab_size),
        dtype=dtype_name(raw, where),
        encoder=_encoder(config, folder, traced.encoder_head_dim) if has_encoder else None,
        mtp_layers=_mtp_layers(raw, where) if config.model_type in _WITH_MTP else 0,
        input_size=getattr(own, "hidden_size_per_layer_input", None) or 0,
    )


def _mtp_layers(raw: dict[str, Any], where: str) -> int:
    named = by_own_names(raw, {"num_mtp_layers": MTP_COUNT}, where)
    return whole(named, MTP_COUNT, where, 0, least=0, most=MAX_LAYERS)


def load_hf_config(folder: Path) -> Any:
    """transformers' config object, after all that can be refused by it alone."""
    found, where = described(folder), str(folder / "config.json")
    raw = found.config
    name = raw.get("model_type")
    if name not in CONFIG_MAPPING:
        if name is None:
            raise ValueError(f"{where} lacks model_type; expected the name of a family, such as 'llama'")
        why = "its code is its own (auto_map), and a model folder's code is not run" if "auto_map" in raw else "it is unknown"
        alike = nearest_name(str(name), CONFIG_MAPPING)
        nearest = f"{alike!r}, or a newer transformers" if alike else "a newer transformers"
        raise ValueError(f"{where}: model_type must be one that transformers knows, got {name!r}: {why}; nearest: {nearest}")
    if (folder / SIDECAR).is_file():
        raise ValueError(
            f"{folder / SIDECAR} must be absent: it says how weights of 8 or 4 bits are stored, which specdec's own modules "
            "read, not transformers' code; nearest: backend='auto', where specdec has a module of its own for the model, or "
            "its checkpoint in bfloat16"
        )
    refuse_values(raw, where)
    refuse_unread(raw, where)
    try:
        read = as_transformers_reads(raw)
        config = (
            CONFIG_MAPPING[name].from_dict(read)
            if found.wrapper or read is not raw
            else AutoConfig.from_pretrained(folder, local_files_only=True)
        )
    except Exception as error:  # of any kind: config classes check themselves, each in its way
        raise ValueError(f"{where}: transformers does not accept it: {one_line(error)}") from error
    _refuse(config, where)
    return config


def unknown_keys(folder: Path) -> list[str]:
    """Keys of config.json that transformers' class of the model does not know, and so ignores; known noise left out."""
    raw = target_json(folder)
    if raw["model_type"] not in CONFIG_MAPPING:
        return []  # whoever reads the config refuses it
    made = CONFIG_MAPPING[raw["model_type"]]()
    own = _OWN_HARMLESS_KEYS.get(raw["model_type"], frozenset())
    known = {*made.to_dict(), *made.attribute_map, *NATIVE_KEYS, *_HARMLESS_KEYS, *own}
    return sorted(key for key in raw if key not in known and not key.startswith("_"))


def _refuse(config: Any, where: str) -> None:
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        if name in ENCODER_DECODERS:
            return
        raise ValueError(
            f"{where}: {name} is an encoder-decoder model that {_NO_ENCODER.get(name, 'was never tried')}, expected a "
            f"decoder-only one, such as a Llama, or an encoder-decoder model of type {', '.join(ENCODER_DECODERS)}"
        )
    text = config.get_text_config(decoder=True)
    if text is not config:
        why = f": {LEFT[name]}" if name in LEFT else ""
        raise ValueError(
            f"{where}: {name} wraps several models, of which the text model can't be taken alone{why}; expected one of "
            f"{', '.join(WRAPPERS)}, or a text model's own folder, such as one whose config.json is this one's text_config "
            f"({getattr(text, 'model_type', text)!s}) and whose weights are its decoder's"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{where}: transformers has no causal language model of model_type {name!r}")


def _encoder(config: Any, folder: Path, head_dim: int | None) -> EncoderConfig:
    """What the encoder reads, and the tokens that the decoder's text begins with, as transformers' generate begins it.

    It reads generation_config.json alone where there is one; config.json's first token is taken where that names none.
    """

    def named(path: Path, key: str) -> int | None:
        if (value := of_texts(read_json(path), key)) is None:
            return None
        return whole({key: value}, key, str(path), least=0, most=decoder_config(config).vocab_size - 1)

    files = [path for path in (folder / GENERATION, folder / "config.json") if path.is_file()]
    begun = (named(path, key) for path in files for key in ("decoder_start_token_id", "bos_token_id"))
    first = next((token for token in begun if token is not None), None)
    if first is None:
        raise ValueError(
            f"{folder / 'config.json'}: decoder_start_token_id must be the id that the decoder's text begins with, got None"
        )
    assert head_dim is not None, "the trace has run the encoder"
    forced = named(files[0], "forced_bos_token_id")
    longest, _ = _max_position(getattr(config, "encoder", config))
    return EncoderConfig(longest, (first,) if forced is None else (first, forced), head_dim)


def layer_kinds(config: Any, where: str) -> tuple[LayerKind, ...]:
    """Which keys each layer reads: by layer_types, or, where a config has none, one window for all."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    spans = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    if odd := sorted(set(types) - set(spans)):
        raise ValueError(
            f"{where}: {config.model_type} has layers of type {', '.join(odd)}, expected {', '.join(spans)}: state-space, "
            "linear and hybrid layers keep no keys and values"
        )
    for kind in sorted(set(types) - {"full_attention"}):
        span = spans[kind]
        if not isinstance(span, int) or span < 1:
            key = "sliding_window" if kind == "sliding_attention" else "attention_chunk_size"
            raise ValueError(f"{where}: {key} must be a positive number of tokens for layers of type {kind}, got {span!r}")
    made = {
        "full_attention": FULL,
        "sliding_attention": LayerKind(window=window) if "sliding_attention" in types else FULL,
        "chunked_attention": LayerKind(chunk=chunk) if "chunked_attention" in types else FULL,
    }
    return tuple(made[kind] for kind in types)


def _check_windows(kinds: tuple[LayerKind, ...], traced: TracedCalls, where: str) -> None:
    for layer, (kind, passed) in enumerate(zip(kinds, traced.sliding_windows, strict=True)):
        if kind.window != passed:
            raise ValueError(
                f"{where}: by the config (sliding_window, layer_types), layer {layer} has window {kind.window}, but its code "
                f"gives attention {passed}: which of them is meant is not known; nearest thing that works: no sliding_window"
            )


def _intermediate_size(config: Any, traced: TracedCalls) -> int:
    """The width of the layers' MLPs, on average where the config has one for each layer; costs are estimated from it."""
    sizes = getattr(config, "intermediate_size", None) or 4 * traced.hidden_size
    return sizes if isinstance(sizes, int) else round(sum(sizes) / len(sizes))


def _is_many(count: Any) -> bool:
    """A number, or some models' one a layer."""
    return any(isinstance(number, int) and number > 1 for number in (count if isinstance(count, (list, tuple)) else [count]))


def _max_position(config: Any) -> tuple[int, str]:
    """Up to where positions mean one thing, and which key says so: longrope turns all of a text's by other angles once it is
    longer than its original length."""
    why = longest_key(config.model_type) or "max_position_embeddings"
    most = getattr(config, why, None) or 2048
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") == "longrope" and parameters["original_max_position_embeddings"] < most:
            most = parameters["original_max_position_embeddings"]
            why = "original_max_position_embeddings (longer texts turn by longrope's other angles)"
    return most, why


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Of all layers, or of each type of them, full attention first."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if not any(isinstance(value, dict) for value in parameters.values()):
        return [parameters]
    by_type = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    full = [by_type.pop("full_attention")] if "full_attention" in by_type else []
    return full + list(by_type.values())


def _rope(config: Any) -> RopeConfig:
    """What a head that says nothing of rope follows (the target turns its own): of full layers; theta alone, if we can't."""
    parameters = _rope_parameters(config)[0]
    try:
        return parse_rope({"rope_parameters": parameters})
    except ValueError:
        return RopeConfig(theta=float(parameters.get("rope_theta") or RopeConfig.theta))
