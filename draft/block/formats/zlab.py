"""DFlash heads as z-lab publishes them, and those of SpecForge and NeMo, which share the layout; SpecForge's DSpark heads too.

All but the sizes stands in `dflash_config`.  z-lab's and NeMo's blocks are never causal; SpecForge's are in layers with a
window.  Where a head has such layers and nothing says whose it is, its causality is open, and it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.draft.block.formats.common import (
    MARKOV_KEYS,
    block_model,
    block_reading,
    block_size,
    correction_of,
    features_of,
    mask_id,
)
from specdec.draft.formats.body import check_nested
from specdec.draft.formats.reading import HeadFiles, HeadFormat, ParsedHead
from specdec.draft.formats.spec import BlockSpec
from specdec.models.checkpoints.config_values import flag, mapping
from specdec.models.config import ModelConfig

NAME, SPECFORGE, NESTED_NAME = "z-lab", "specforge", "dflash_config"
ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "DSparkDraftModel")
OWN_KEYS = frozenset((NESTED_NAME, "block_size", "num_target_layers", "is_causal", "target_hidden_size"))
NEUTRAL: Mapping[str, Sequence[Any]] = {  # of dflash_config: the values that mean what we compute; empty: read below
    "target_layer_ids": (), "mask_token_id": (), "block_size": (), "num_target_layers": (),
    "projector_type": (None, "dflash", "dspark"), "causal_head": (None, False), "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0), "final_logit_softcapping": (None,), "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0), "shift_label": (None, False), "pure_draft_prefix_len": (None, 0),
    "use_swa": (None, False), "swa_window_size": (None,),
}  # fmt: skip
DSPARK: Mapping[str, Sequence[Any]] = dict.fromkeys((*MARKOV_KEYS, "confidence_head_alpha"), ())


def read(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    """A head of which nothing says that it is SpecForge's."""
    return _read(files, target, NAME)


def read_specforge(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    return _read(files, target, SPECFORGE)


def _read(files: HeadFiles, target: ModelConfig | None, name: str) -> ParsedHead:
    where, raw = files.where, files.raw
    named = raw.get("architectures") or [ARCHITECTURES[0]]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise ValueError(f"{where}: architectures must be one of {', '.join(ARCHITECTURES)}, got {named!r}")
    nested = mapping(raw, NESTED_NAME, where)
    is_dspark = any("markov" in tensor for tensor in files.checkpoint.names())
    if is_dspark and named[0] != "DSparkDraftModel":
        raise ValueError(f"{where}: tensors of a Markov head belong to DSparkDraftModel, but architectures is {named!r}")
    check_nested(nested, {**NEUTRAL, **(DSPARK if is_dspark else {})}, where, NESTED_NAME)
    if not is_dspark and nested.get("projector_type") == "dspark":
        raise ValueError(f"{where}: dflash_config.projector_type is dspark, but the tensors of a Markov head are missing")
    model = block_model(raw, OWN_KEYS, target, where)
    sizes = {part["block_size"] for part in (raw, nested) if part.get("block_size") is not None}
    if len(sizes) > 1:
        raise ValueError(f"{where}: block_size and dflash_config.block_size must be equal, got {sorted(map(str, sizes))}")
    size = block_size({"block_size": next(iter(sizes), None)}, where)
    causal = _causal(raw, model, where, name)
    found: dict[str, Any] = {}
    if is_dspark:
        alpha = nested.get("confidence_head_alpha") or 0
        found = correction_of(nested, where, 0, isinstance(alpha, (int, float)) and alpha > 0, False)
    block = BlockSpec(size, mask_id(nested, model, where), causal, not is_dspark, **found)
    there = {**nested, "num_target_layers": raw.get("num_target_layers", nested.get("num_target_layers"))}
    features = features_of(there, "target_layer_ids", target, model.num_layers, where, may_be_absent=True)
    ids = nested.get("target_layer_ids")
    meanings = {"target_layer_ids": "absent: evenly from 1 to N - 3" if ids is None else f"{ids}: 0-based outputs of layers"}
    return block_reading(files, model, block, features, target, name, meanings)


def _causal(raw: dict[str, Any], model: ModelConfig, where: str, name: str) -> tuple[bool, ...]:
    """For each layer, whether its blocks are causal."""
    sliding = tuple(kind.window is not None for kind in model.layer_kinds)
    if raw.get("is_causal") is not None:  # as NeMo writes
        if flag(raw, "is_causal", where):
            raise ValueError(f"{where}: is_causal must be false: this layout's trainers know no causal blocks in all layers")
        return (False,) * model.num_layers
    if name == SPECFORGE:
        return sliding
    if any(sliding):
        raise ValueError(
            f"{where}: whether blocks are causal in layers with a window is open: z-lab's are not, SpecForge's are; nearest "
            "setting that works: draft_format='specforge' (--draft-format) for a head of SpecForge, or is_causal false in its "
            "config for one of z-lab"
        )
    return (False,) * model.num_layers


FORMAT = HeadFormat(NAME, "z-lab (the DFlash authors), NeMo", "DFlash", read)
