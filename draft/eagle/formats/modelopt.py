"""EAGLE-3 heads of NVIDIA ModelOpt: `midlayer.*` in older exports, `layers.*` in newer ones, `d2t` without `t2d`.  A config
with the keys of latent attention is a head for Kimi or DeepSeek.

The nested `eagle_config` has eight keys, of which five say variants; only the common one is computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.draft.eagle.formats.common import AUX, DEFAULT, eagle3_reading, nested_config, refuse_bias
from specdec.draft.eagle.formats.latent import ARCHITECTURE, RANK, latent_layers, latent_meanings
from specdec.draft.formats.body import aux_layers_of, check_features, head_layers
from specdec.draft.formats.reading import HeadFiles, ParsedHead, PartNames
from specdec.models.config import ModelConfig
from specdec.models.latent.config import LatentConfig

NAME, DEEP = "modelopt", "LlamaForCausalLMEagle3Deep"
MARK = "next_layer_regular"
ARCHITECTURES = ("LlamaForCausalLMEagle3", DEEP, ARCHITECTURE)
OWN_KEYS = frozenset(("draft_vocab_size", "eagle_config", "target_hidden_size", "bias"))
NESTED: Mapping[str, Sequence[Any]] = {
    AUX: (),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    MARK: (True,),
    "parallel_draft_step": (None, 1),
    "parallel_draft_heads_num_layers": (None, 0, 1),
}


def read(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    where = files.where
    raw = {key: value for key, value in files.raw.items() if value is not None}  # the exporter writes many nulls
    check_features(target, where)
    has_latents = _check_top(raw, where)
    eagle = nested_config(raw, NESTED, where)
    if missing := sorted(set(NESTED) - set(eagle)):
        raise ValueError(f"{where}: eagle_config lacks {', '.join(missing)}, which ModelOpt always writes")
    read_layers = latent_layers if has_latents else head_layers
    model, ids = read_layers(raw, OWN_KEYS, target, where), eagle[AUX]
    meanings = {
        AUX: f"{ids}: 0-based outputs of layers, in the order of a set, which means nothing" if ids else f"null: {DEFAULT}",
        "hidden_norm": "the feature passes hidden_norm alone; ModelOpt 0.47's own module normed it by input_layernorm before",
        "recycled": "the output before the final norm",
    }
    if isinstance(model, LatentConfig):
        meanings |= latent_meanings(model)
    elif model.rope.kind == "yarn":
        meanings["yarn"] = "as written; exporters add it to heads that were trained without it, which lowers acceptance"
    aux_layers = aux_layers_of(ids or None, target, where, any_order=True)
    names = _names(files, raw, model.num_layers)
    return eagle3_reading(files, model, target, aux_layers, names, meanings, t2d="must not", format=NAME)


def _check_top(raw: dict[str, Any], where: str) -> bool:
    """Whether the head has latent attention.  ValueError if its class and its keys are not of one kind."""
    named = raw.get("architectures") or [ARCHITECTURES[0]]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise ValueError(f"{where}: architectures must be one of {', '.join(ARCHITECTURES)}, got {named!r}")
    refuse_bias(raw, where)
    if (named[0] == ARCHITECTURE) != (RANK in raw):
        has = "needs" if named[0] == ARCHITECTURE else "has no"
        raise ValueError(f"{where}: a head of architectures {named[0]} {has} {RANK}, the rank of latents")
    return RANK in raw


def _names(files: HeadFiles, raw: dict[str, Any], count: int) -> PartNames:
    """By generation: midlayer, or midlayer.0 and on, or layers.0 and on; Megatron's deep export renames later input norms."""
    is_deep = (raw.get("architectures") or [""])[0] == DEEP
    held = files.checkpoint.names()
    generations = {
        "layers.0": [f"layers.{index}" for index in range(count)],
        "midlayer.0": [f"midlayer.{index}" for index in range(count)],
        "midlayer": ["midlayer"],
    }
    found = [key for key in generations if any(re.match(rf"{re.escape(key)}\.[a-z]", name) for name in held)]
    if len(found) != 1:
        got = f"both {found[0]} and {found[1]}" if found else "neither"
        raise ValueError(f"{files.folder}: the layers must be called midlayer.* or layers.*, got {got}")
    first, *others = generations[found[0]]
    if len(others) + 1 != count:
        raise ValueError(f"{files.where}: num_hidden_layers is {count}, but the checkpoint holds one layer, {first}")
    return PartNames(first, tuple(others), "hidden_norm" if is_deep else "input_layernorm")
