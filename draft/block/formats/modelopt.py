"""DFlash and DSpark heads of NVIDIA ModelOpt: z-lab's layout, with `dflash_config.causal` for all layers, and windows there.

A DSpark head has the architecture of a DFlash head and `projector_type` dspark; its Markov head's tensors have no prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec.attention.kinds import LayerKind
from specdec.draft.block.formats.common import (
    block_model,
    block_reading,
    block_size,
    correction_of,
    features_of,
    mask_id,
)
from specdec.draft.formats.body import check_nested
from specdec.draft.formats.reading import HeadFiles, ParsedHead
from specdec.draft.formats.spec import BlockSpec
from specdec.models.checkpoints.config_values import flag, mapping, whole
from specdec.models.config import ModelConfig

NAME, NESTED_NAME, MARK = "modelopt", "dflash_config", "causal"
OWN_KEYS = frozenset((NESTED_NAME, "block_size", "num_target_layers", "target_hidden_size"))
KNOWN: Mapping[str, Sequence[Any]] = {
    "target_layer_ids": (), "mask_token_id": (), MARK: (), "use_swa": (), "swa_window_size": (), "projector_type": (),
    "attention_sink_bias": (None, False), "final_logit_softcapping": (None,), "pure_draft_prefix_len": (None, 0),
}  # fmt: skip
DSPARK: Mapping[str, Sequence[Any]] = {
    "markov_rank": (), "markov_head_type": (), "use_confidence_head": (), "shift_label": (True,)
}  # fmt: skip


def read(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    where = files.where
    raw = {key: value for key, value in files.raw.items() if value is not None}  # the exporter writes many nulls
    if raw.get("architectures") != ["DFlashDraftModel"]:
        raise ValueError(f"{where}: architectures must be ['DFlashDraftModel'], got {raw.get('architectures')!r}")
    nested = mapping(raw, NESTED_NAME, where)
    kind = nested.get("projector_type") or "dflash"
    if kind not in ("dflash", "dspark"):
        raise ValueError(f"{where}: dflash_config.projector_type must be absent, dflash or dspark, got {kind!r}")
    is_dspark = kind == "dspark"
    check_nested(nested, {**KNOWN, **(DSPARK if is_dspark else {})}, where, NESTED_NAME)
    if nested.get(MARK) is None:
        raise ValueError(f"{where} lacks dflash_config.causal, which ModelOpt always writes; expected true or false")
    is_causal = flag(nested, MARK, where)
    model = block_model(raw, OWN_KEYS, target, where)
    if any(each.window for each in model.layer_kinds):
        raise ValueError(f"{where}: layer_types must be all full_attention; ModelOpt's windows stand in dflash_config.use_swa")
    if flag(nested, "use_swa", where):
        window = whole(nested, "swa_window_size", where)
        model = replace(model, layer_kinds=(LayerKind(window=window),) * model.num_layers)
    elif nested.get("swa_window_size") is not None:
        raise ValueError(f"{where}: dflash_config.swa_window_size must be absent where use_swa is not true")
    found: dict[str, Any] = {}
    if is_dspark:
        told = {**nested, "enable_confidence_head": nested.get("use_confidence_head")}
        found = correction_of(told, where, None, None, True)
    if not is_dspark and any("markov" in tensor for tensor in files.checkpoint.names()):
        raise ValueError(f"{where}: tensors of a Markov head need dflash_config.projector_type dspark")
    causal = (is_causal,) * model.num_layers
    block = BlockSpec(
        block_size(raw, where), mask_id(nested, model, where), causal, not is_dspark, **found)  # fmt: skip
    there = {**nested, "num_target_layers": raw.get("num_target_layers")}
    features = features_of(there, "target_layer_ids", target, model.num_layers, where, reads_last=True)
    meanings = {"target_layer_ids": f"{nested.get('target_layer_ids')}: 0-based outputs of layers"}
    parsed = block_reading(files, model, block, features, target, NAME, meanings)
    return replace(parsed, names=replace(parsed.names, markov="", confidence="confidence_proj"))
