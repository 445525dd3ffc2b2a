"""DFlash and DFlash2 heads as z-lab publishes them, and those of SpecForge, NeMo and SGLang, which share the layout; DSpark
heads of SpecForge too.

All but the sizes stands in `dflash_config`; z-lab's own classes look at the top of the config too.  Whether rows of a block
read the rows after them is said by `is_causal`, for all layers.  Where it is absent, layers with a window are causal in the
code of z-lab, SpecForge and SGLang, and no layer is in NeMo's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.draft.block.formats import dflash2
from specdec.draft.block.formats.common import (
    MARKOV_KEYS,
    block_model,
    block_reading,
    block_size,
    correction_of,
    features_of,
    mask_id,
    numbers_of,
)
from specdec.draft.formats.body import check_nested
from specdec.draft.formats.reading import HeadFiles, HeadFormat, ParsedHead
from specdec.draft.formats.spec import BlockSpec
from specdec.models.checkpoints.config_values import flag, mapping
from specdec.models.config import ModelConfig

NAME, SPECFORGE, NESTED_NAME = "z-lab", "specforge", "dflash_config"
SELECTING = {  # architectures of DFlash2 heads, and what their absent keys mean
    "DFlash2DraftModel": dflash2.ZLAB, "Qwen3DFlash2DraftModel": dflash2.NEMO,
    "DFlash2BeamDraftModel": dflash2.SGLANG, "MiniMaxDFlash2DraftModel": dflash2.SGLANG,
}  # fmt: skip
NEMO = ("Qwen3DFlashDraftModel", "Qwen3DFlash2DraftModel")
ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "DSparkDraftModel", *SELECTING)
OWN_KEYS = frozenset((NESTED_NAME, "block_size", "num_target_layers", "is_causal", "target_hidden_size"))
# Of dflash_config, what z-lab's classes look for at the top of the config where it is absent.
ANYWHERE = (
    "target_layer_ids", "mask_token_id", "block_size", "final_logit_softcapping", "input_embedding_scale", "output_multiplier",
    *dflash2.KEYS,
)  # fmt: skip
NEUTRAL: Mapping[str, Sequence[Any]] = {  # of dflash_config: the values that mean what we compute; empty: read below
    **dict.fromkeys((*ANYWHERE, "num_target_layers"), ()),
    "projector_type": (None, "dflash", "dspark"), "causal_head": (None, False), "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0), "shift_label": (None, False), "pure_draft_prefix_len": (None, 0),
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
    named = _architecture(files, name)
    nested = mapping(raw, NESTED_NAME, where)
    is_dspark = any("markov" in tensor for tensor in files.checkpoint.names())
    if is_dspark and named != "DSparkDraftModel":
        raise ValueError(f"{where}: tensors of a Markov head belong to DSparkDraftModel, but architectures is {[named]!r}")
    check_nested(nested, {**NEUTRAL, **(DSPARK if is_dspark else {})}, where, NESTED_NAME)
    if not is_dspark and nested.get("projector_type") == "dspark":
        raise ValueError(f"{where}: dflash_config.projector_type is dspark, but the tensors of a Markov head are missing")
    at_top = ANYWHERE if name == NAME and named in ("DFlashDraftModel", "DFlash2DraftModel") else ("block_size",)
    model = block_model(raw, OWN_KEYS.union(at_top), target, where)
    told = {**nested, **_anywhere(raw, nested, at_top, where)}
    size = block_size(told, where)
    found = numbers_of(told, where)
    if is_dspark:
        alpha = nested.get("confidence_head_alpha") or 0
        found |= correction_of(nested, where, 0, isinstance(alpha, (int, float)) and alpha > 0, False)
    if named in SELECTING:
        dflash2.refuse_suffixed_tables(files)
        found |= dflash2.selection_of(told, model, size, where, SELECTING[named], f"{NESTED_NAME}.")
    else:
        dflash2.refuse_keys(told, where, f"{NESTED_NAME}.")
    causal, said = _causal(raw, model, where, name, named)
    block = BlockSpec(size, mask_id(told, model, where), causal, not is_dspark, **found)
    there = {**told, "num_target_layers": raw.get("num_target_layers", nested.get("num_target_layers"))}
    features = features_of(there, "target_layer_ids", target, model.num_layers, where, may_be_absent=True)
    ids = told.get("target_layer_ids")
    meanings = {"target_layer_ids": "absent: evenly from 1 to N - 3" if ids is None else f"{ids}: 0-based outputs of layers"}
    return block_reading(files, model, block, features, target, name, {**meanings, **said})


def _architecture(files: HeadFiles, name: str) -> str:
    """The class that the config names.  ValueError if it is not one of the layout's, or its tensors are another kind's."""
    where, named = files.where, files.raw.get("architectures") or [ARCHITECTURES[0]]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise ValueError(f"{where}: architectures must be one of {', '.join(ARCHITECTURES)}, got {named!r}")
    if dflash2.has_selector(files) and named[0] not in SELECTING:
        raise ValueError(
            f"{where}: tensors of candidate_selector belong to one of {', '.join(SELECTING)}, but architectures is {named!r}"
        )
    return str(named[0])


def _anywhere(raw: dict[str, Any], nested: dict[str, Any], keys: Sequence[str], where: str) -> dict[str, Any]:
    """The values of these keys, wherever they stand.  ValueError if they stand in both places, and differ."""
    found = dict[str, Any]()
    for key in keys:
        values = [part[key] for part in (nested, raw) if part.get(key) is not None]
        if len(values) == 2 and (values[0] != values[1] or type(values[0]) is not type(values[1])):
            raise ValueError(f"{where}: {key} and {NESTED_NAME}.{key} must be equal, got {values[1]!r} and {values[0]!r}")
        if values:
            found[key] = values[0]
    return found


def _causal(
    raw: dict[str, Any], model: ModelConfig, where: str, name: str, named: str
) -> tuple[tuple[bool, ...], dict[str, str]]:
    """For each layer, whether its blocks are causal; and what was taken to mean that, for users."""
    sliding = tuple(kind.window is not None for kind in model.layer_kinds)
    if raw.get("is_causal") is not None:
        is_causal = flag(raw, "is_causal", where)
        if is_causal and (name == SPECFORGE or named in NEMO):
            raise ValueError(f"{where}: is_causal must be false: this layout's trainers know no causal blocks in all layers")
        return (is_causal,) * model.num_layers, {}
    if not any(sliding) or named in NEMO:
        return (False,) * model.num_layers, {}
    whose = "SpecForge's" if name == SPECFORGE else "z-lab's and SGLang's"
    return sliding, {"is_causal": f"absent: layers with a window are causal, as in {whose} code"}


FORMAT = HeadFormat(NAME, "z-lab (the DFlash authors), NeMo, SGLang", "DFlash, DFlash2", read)
