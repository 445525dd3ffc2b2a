"""Loads an EAGLE head from a folder in the SafeAILab layout, strictly.  Knows names and config keys, not how a head computes.

Layouts: EAGLE-3 has `midlayer.*` (or `layers.0.*`) with projections two hidden sizes wide; EAGLE-1/2 has `fc` over two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specdec.attention.kinds import LayerKind
from specdec.draft.eagle.head import HEADS, DraftHead, Eagle1Head, Eagle3Head, HeadConfig
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.config_values import flag, mapping, text, whole
from specdec.models.checkpoints.loader import (
    build,
    copy_,
    expect_layer_sizes,
    fill_attention,
    fill_layer,
    fill_linear,
    fill_mlp,
    fill_norm,
)
from specdec.models.checkpoints.swapped import refuse_target_tensors
from specdec.models.config import WINDOWED, ModelConfig, parse_config, parse_rope, read_json, sliding_window
from specdec.models.kv_source import KEY
from specdec.models.sharding import join, share_of
from specdec.models.target import Target

_HEAD_KEYS = frozenset(  # what a head's config has beyond a Llama's
    "bias draft_vocab_size eagle_aux_hidden_state_layer_ids eagle_config target_hidden_size target_model_type".split()
)
_EAGLE3_KEYS = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config")
_EAGLE_KEYS: Mapping[str, Sequence[Any]] = {  # key: the values that mean what we compute; empty: any
    "eagle_aux_hidden_state_layer_ids": (),
    "norm_before_residual": (True, False),
    "use_aux_hidden_state": (True,),
    "norm_output": (False, None),  # runtimes disagree on what True means
    "norm_before_fc": (False, None),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (0, 1),
}


def default_aux_layers(num_layers: int, where: str = "config.json") -> tuple[int, ...]:
    """The reference's features when a config names none: outputs of layers 1, N//2 - 1 and N - 4 (0-based)."""
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if not 0 <= layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"{where}: a target of {num_layers} layers has no default aux layers (1, N//2-1, N-4 must ascend); "
            "name them in eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    return layers


def load_head(folder: Path, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """The head in the folder, sharing what it does not own with the target.

    ValueError names any config key or tensor that is unknown, missing or contradicts the target.
    """
    checkpoint = Checkpoint(folder)
    config = read_head_config(folder, target.config, checkpoint)
    _expect_sizes(config, checkpoint)
    own = replace(config, model=share_of(config.model, target.config.shard))
    head = build(lambda: HEADS[config.kind](own, max_positions), device, dtype)
    if isinstance(head, Eagle3Head):
        _fill_eagle3(head, checkpoint)
    else:
        assert isinstance(head, Eagle1Head)
        _fill_eagle1(head, checkpoint)
    _fill_embeddings(head, checkpoint, target)
    _fill_lm_head(head, checkpoint, target)
    checkpoint.ignore("rotary_emb.inv_freq")
    checkpoint.finish()
    join(head, target.group)
    return head


def read_head_config(folder: Path, target: ModelConfig, checkpoint: Checkpoint | None = None) -> HeadConfig:
    """The config of the head in the folder, for that target.  checkpoint: the folder's, if it is open.

    ValueError: see `load_head`.
    """
    path = folder / "config.json"
    raw = read_json(path)
    checkpoint = checkpoint or Checkpoint(folder)
    refuse_target_tensors(checkpoint.names(), folder)
    return parse_head_config(raw, checkpoint, target, str(path))


def parse_head_config(raw: dict[str, Any], checkpoint: Checkpoint, target: ModelConfig, where: str) -> HeadConfig:
    """A head's config held against its own tensors and its target's config."""
    _refuse_unread(raw, where)
    text(raw, "model_type", where)
    has_bias = flag(raw, "bias", where, True)
    llama = {key: value for key, value in raw.items() if key not in (*_HEAD_KEYS, "layer_types")}
    model = parse_config({"rms_norm_eps": target.rms_norm_eps, **llama, "model_type": "llama"}, where)
    kinds = _layer_kinds(raw, model.num_layers, where)
    model = replace(model, rope=parse_rope(raw, where, default=target.rope), tie_embeddings=False, layer_kinds=kinds)
    if model.vocab_size != target.vocab_size:
        raise ValueError(f"{where}: vocab_size must be the target's {target.vocab_size}, got {model.vocab_size}")
    width = whole(raw, "target_hidden_size", where, target.hidden_size)
    if width != target.hidden_size:
        raise ValueError(f"{where}: target_hidden_size must be the target's {target.hidden_size}, got {width}")
    if _layer_prefix(checkpoint) is None or f"{_layer_prefix(checkpoint)}.hidden_norm.weight" not in checkpoint:
        if model.hidden_size != target.hidden_size:
            raise ValueError(f"{where}: hidden_size must be the target's {target.hidden_size}, got {model.hidden_size}")
        only = [key for key in _EAGLE3_KEYS if raw.get(key) is not None]
        if only:
            raise ValueError(f"{where}: {', '.join(only)} belong to EAGLE-3, but the tensors are an EAGLE-1/2 head's")
        return HeadConfig(model, "eagle1", (), width, target.vocab_size, fc_bias=has_bias)
    if target.features_refusal:
        raise ValueError(
            f"{where}: an EAGLE-3 head reads the outputs of its target's layers, but of this {target.family} target "
            f"{target.features_refusal}; nearest: an EAGLE-1/2 head, which reads the final hidden state"
        )
    if model.num_layers != 1:
        raise ValueError(f"{where}: an EAGLE-3 head must have num_hidden_layers 1, got {model.num_layers}")
    eagle = mapping(raw, "eagle_config", where)
    ids = eagle.get("eagle_aux_hidden_state_layer_ids", raw.get("eagle_aux_hidden_state_layer_ids"))
    named = ids is not None
    aux_layers = _check_aux_layers(ids, target.num_layers, where) if named else default_aux_layers(target.num_layers, where)
    return HeadConfig(
        model,
        "eagle3",
        aux_layers,
        width,
        whole(raw, "draft_vocab_size", where, target.vocab_size, most=target.vocab_size),
        norm_before_residual=flag(eagle, "norm_before_residual", f"{where}: eagle_config"),
    )


def _layer_kinds(raw: dict[str, Any], num_layers: int, where: str) -> tuple[LayerKind, ...]:
    """A head is a Llama, but unlike one may have a window.  Heads made from a Qwen's config ship its switch too."""
    window = sliding_window({"sliding_window": None, **raw}, where) if flag(raw, "use_sliding_window", where, True) else None
    if raw.get("use_sliding_window") and window is None:
        raise ValueError(f"{where}: use_sliding_window is true, so sliding_window must be a number of tokens, got {window}")
    expected = [WINDOWED if window else "full_attention"] * num_layers
    if raw.get("layer_types") not in (None, expected):
        raise ValueError(f"{where}: with sliding_window {window}, layer_types must be {expected}, got {raw['layer_types']}")
    return (LayerKind(window=window),) * num_layers


def _refuse_unread(raw: dict[str, Any], where: str) -> None:
    if "speculators_model_type" in raw:
        raise ValueError(
            f"{where}: a `speculators` checkpoint; expected the SafeAILab layout (its layer ids count differently)"
        )
    if KEY in raw:
        raise ValueError(f"{where}: {KEY} must be absent: each layer of a head stores its own keys and values")
    for key, value in mapping(raw, "eagle_config", where).items():
        if key not in _EAGLE_KEYS:
            raise ValueError(f"{where}: unknown key eagle_config.{key}; it may change what the head computes")
        allowed = _EAGLE_KEYS[key]
        if allowed and not any(type(value) is type(one) and value == one for one in allowed):
            raise ValueError(f"{where}: eagle_config.{key} must be {' or '.join(map(str, allowed))}, got {value!r}")


def _check_aux_layers(ids: Any, num_layers: int, where: str) -> tuple[int, ...]:
    """Sorted: exporters write them in a set's order, and features are concatenated ascending."""
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids) or len(set(ids)) != len(ids):
        raise ValueError(f"{where}: eagle_aux_hidden_state_layer_ids must be a list of distinct layer numbers, got {ids!r}")
    if min(ids) < 0 or max(ids) >= num_layers:
        raise ValueError(f"{where}: eagle_aux_hidden_state_layer_ids must lie in [0, {num_layers - 1}], got {ids}")
    return tuple(sorted(ids))


def _expect_sizes(config: HeadConfig, checkpoint: Checkpoint) -> None:
    """ValueError if the config's sizes are not those of the tensors: keeps an absurd size from taking time and memory."""
    H = config.model.hidden_size
    if config.kind == "eagle3":
        checkpoint.expect("fc.weight", (H, config.feature_size), "hidden_size and eagle_aux_hidden_state_layer_ids")
        expect_layer_sizes(checkpoint, f"{_layer_prefix(checkpoint)}", config.model, 2 * H)
        if "lm_head.weight" in checkpoint:
            checkpoint.expect("lm_head.weight", (config.draft_vocab_size, H), "draft_vocab_size and hidden_size")
    else:
        checkpoint.expect("fc.weight", (H, H + config.target_hidden_size), "hidden_size and target_hidden_size")
        checkpoint.expect_layers("layers", config.model.num_layers)
        expect_layer_sizes(checkpoint, "layers.0", config.model, H)


def _layer_prefix(checkpoint: Checkpoint) -> str | None:
    for prefix in ("midlayer", "midlayer.0", "layers.0"):
        if f"{prefix}.self_attn.q_proj.weight" in checkpoint:
            return prefix
    return None


def _fill_eagle3(head: Eagle3Head, checkpoint: Checkpoint) -> None:
    prefix = _layer_prefix(checkpoint)
    fill_linear(head.fc, checkpoint, "fc")
    fill_norm(head.norm, checkpoint, "norm")
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        fill_norm(getattr(head, name), checkpoint, f"{prefix}.{name}")
    fill_attention(head.self_attn, checkpoint, f"{prefix}.self_attn")
    fill_mlp(head.mlp, checkpoint, f"{prefix}.mlp")


def _fill_eagle1(head: Eagle1Head, checkpoint: Checkpoint) -> None:
    fill_linear(head.fc, checkpoint, "fc")
    for index, layer in enumerate(head.layers):
        fill_layer(layer, checkpoint, f"layers.{index}")


def _fill_embeddings(head: DraftHead, checkpoint: Checkpoint, target: Target) -> None:
    """An EAGLE-3 head's own embeddings where it ships some; else the target's.  EAGLE-1/2 never trains them: the target's."""
    model = head.config.model
    if "embed_tokens.weight" in checkpoint and isinstance(head, Eagle3Head):
        copy_(head.embed_tokens.weight, checkpoint, "embed_tokens.weight")
        return
    checkpoint.ignore("embed_tokens.weight")
    if model.hidden_size != target.config.hidden_size:
        raise ValueError(
            f"{checkpoint.folder}: a head of hidden_size {model.hidden_size} needs embed_tokens.weight of its own, "
            f"since the target's is {target.config.hidden_size} wide"
        )
    head.embed_tokens = target.embed_tokens


def _fill_lm_head(head: DraftHead, checkpoint: Checkpoint, target: Target) -> None:
    """The head's own language-model head and vocabulary map, or the target's when it has none."""
    Vd, V = head.config.draft_vocab_size, target.config.vocab_size
    where = checkpoint.folder
    if isinstance(head, Eagle3Head) and "lm_head.weight" in checkpoint:
        fill_linear(head.lm_head, checkpoint, "lm_head")
    elif Vd == V and head.config.model.hidden_size == target.config.hidden_size:
        checkpoint.ignore("lm_head.weight")
        head.lm_head = target.lm_head
    else:
        raise ValueError(f"{where}: draft_vocab_size {Vd} (of {V}) needs an lm_head.weight of {Vd} rows in the checkpoint")
    if "d2t" not in checkpoint:
        if Vd != V:
            raise ValueError(f"{where}: draft_vocab_size {Vd} (of {V}) needs a d2t tensor that maps draft ids to target ids")
        checkpoint.ignore("t2d")
        return
    d2t_V = checkpoint.take_integers("d2t", (Vd,)).long()
    ids_V = d2t_V + torch.arange(Vd)
    # Each id is compared with the vocabulary too: the difference of two ids near the ends of int64 wraps around.
    if not bool(((ids_V >= 0) & (ids_V < V)).all() and (ids_V.diff() > 0).all()):
        raise ValueError(
            f"{checkpoint.file('d2t')}: d2t must hold offsets (target id = draft id + d2t[draft id]) that give ascending ids "
            f"in [0, {V - 1}]; got others (absolute ids?)"
        )
    if "t2d" in checkpoint:
        t2d_V = checkpoint.take_integers("t2d", (V,)).bool()
        if int(t2d_V.sum()) != Vd or not bool(t2d_V[ids_V].all()):
            raise ValueError(f"{checkpoint.file('t2d')}: t2d does not mark the {Vd} target ids that d2t maps to")
    head.d2t_V = d2t_V.to(target.embed_tokens.weight.device) if bool(d2t_V.any()) else None
