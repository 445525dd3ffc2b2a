"""Heads as the authors of EAGLE publish them (SafeAILab; "yuhuili" on the hub): EAGLE-1/2 and EAGLE-3, and heads trained here.

EAGLE-3 has `midlayer.*`, EAGLE-1/2 has `layers.*` without the first input norm.  The config is a Llama's.  A nested
`eagle_config`, which others have added to this layout, may name the target's layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec.draft.formats.body import (
    aux_layers_of,
    check_features,
    layer_count,
    parse_body,
    parse_head_rope,
    width_of_features,
    windows_of,
)
from specdec.draft.formats.reading import Format, HeadFiles, Names, Reading
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.formats.vocabulary import read_draft_ids
from specdec.models.checkpoints.config_values import flag, mapping, whole
from specdec.models.config import ModelConfig

NAME, AUX = "safeailab", "eagle_aux_hidden_state_layer_ids"
EAGLE3_KEYS = ("draft_vocab_size", AUX, "eagle_config")
OWN_KEYS = frozenset(("bias", "target_hidden_size", *EAGLE3_KEYS))
NESTED_KEYS: Mapping[str, Sequence[Any]] = {  # of eagle_config: the values that mean what we compute; empty: any
    AUX: (),
    "norm_before_residual": (True, False),
    "use_aux_hidden_state": (True,),
    "norm_output": (False, None),  # runtimes disagree on what True means
    "norm_before_fc": (False, None),
}


def read(files: HeadFiles, target: ModelConfig | None) -> Reading:
    """An EAGLE-3 head if there is a norm of the feature, else an EAGLE-1/2 head."""
    raw, where = files.raw, files.where
    is_eagle3 = "midlayer.hidden_norm.weight" in files.checkpoint
    has_bias = flag(raw, "bias", where, True)
    model = parse_body(raw, OWN_KEYS, target, where)
    silent = not any(raw.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling"))
    rope = parse_head_rope(raw, target, where, silent=True)
    model = replace(model, rope=rope, layer_kinds=windows_of(raw, model.num_layers, where))
    meanings = {"rope": "absent: the target's"} if silent else {}
    width = width_of_features(raw, model.hidden_size, target, where)
    return _eagle3(files, model, width, target, meanings) if is_eagle3 else _eagle1(files, model, width, has_bias, meanings)


def _eagle1(files: HeadFiles, model: ModelConfig, width: int, has_bias: bool, meanings: dict[str, str]) -> Reading:
    where = files.where
    if model.hidden_size != width:
        raise ValueError(f"{where}: hidden_size must be the target's {width}, got {model.hidden_size}")
    if only := [key for key in EAGLE3_KEYS if files.raw.get(key) is not None]:
        raise ValueError(f"{where}: {', '.join(only)} belong to EAGLE-3, but the tensors are an EAGLE-1/2 head's")
    spec = HeadSpec(model, "eagle1", (), width, model.vocab_size, fc_bias=has_bias, own_lm_head=False, format=NAME)
    names = Names("layers.0", tuple(f"layers.{index}" for index in range(1, model.num_layers)))
    beside = {"embed_tokens.weight": "not read: the target's are used, as EAGLE-1/2 never trains them"}
    held = {name: what for name, what in beside.items() if name in files.checkpoint}
    return Reading(spec, names, held, {**meanings, "bias": f"fc has {'a' if has_bias else 'no'} bias"})


def _eagle3(files: HeadFiles, model: ModelConfig, width: int, target: ModelConfig | None, meanings: dict[str, str]) -> Reading:
    raw, where, checkpoint = files.raw, files.where, files.checkpoint
    check_features(target, where)
    layer_count(raw, where, 1)
    eagle = nested_config(raw, NESTED_KEYS, where)
    ids = _layer_ids(raw.get(AUX), eagle.get(AUX), where)
    draft_size = whole(raw, "draft_vocab_size", where, model.vocab_size, most=model.vocab_size)
    before = flag(eagle, "norm_before_residual", f"{where}: eagle_config")
    spec = HeadSpec(
        model,
        "eagle3",
        aux_layers_of(ids, target, where, any_order=True),
        width,
        draft_size,
        norm_before_residual=before,
        own_embeddings="embed_tokens.weight" in checkpoint,
        own_lm_head=own_lm_head(files, draft_size, model.vocab_size),
        draft_ids=read_draft_ids(files, draft_size, model.vocab_size),
        format=NAME,
    )
    meanings = {
        **meanings,
        AUX: "absent: 1, N//2 - 1 and N - 4" if ids is None else f"{ids}: 0-based outputs of layers, in any order",
        "norm_before_residual": f"{before}: the residual is the {'normed' if before else 'raw'} feature",
        "recycled": "the output before the final norm",
    }
    return Reading(spec, Names("midlayer"), vocabulary_tensors(files), meanings)


def _layer_ids(top: Any, nested: Any, where: str) -> Any:
    """The list of layers, which either place may hold; None: neither does."""
    if top is not None and nested is not None and top != nested:
        raise ValueError(f"{where}: {AUX} is {top} at the top and {nested} in eagle_config; expected one list")
    return top if nested is None else nested


def nested_config(raw: dict[str, Any], known: Mapping[str, Sequence[Any]], where: str) -> dict[str, Any]:
    """eagle_config, all of whose keys are known and have a value that is computed."""
    eagle = mapping(raw, "eagle_config", where)
    for key, value in eagle.items():
        if key not in known:
            raise ValueError(f"{where}: unknown key eagle_config.{key}; it may change what the head computes")
        allowed = known[key]
        if allowed and not any(type(value) is type(one) and value == one for one in allowed):
            raise ValueError(f"{where}: eagle_config.{key} must be {' or '.join(map(str, allowed))}, got {value!r}")
    return eagle


def own_lm_head(files: HeadFiles, draft_size: int, vocab_size: int) -> bool:
    """Whether the head brings its language-model head; only with the target's whole vocabulary may it have none."""
    if "lm_head.weight" in files.checkpoint:
        return True
    if draft_size != vocab_size:
        raise ValueError(
            f"{files.folder}: draft_vocab_size {draft_size} (of {vocab_size}) needs an lm_head.weight of {draft_size} rows in "
            "the checkpoint"
        )
    return False


def vocabulary_tensors(files: HeadFiles) -> dict[str, str]:
    """The tensors that `read_draft_ids` has read."""
    made = {"d2t": "the target's id of each draft id, by offsets", "t2d": "held against d2t"}
    return {name: what for name, what in made.items() if name in files.checkpoint}


FORMAT = Format(NAME, "SafeAILab (the EAGLE authors)", "EAGLE-1, EAGLE-2, EAGLE-3", read)
