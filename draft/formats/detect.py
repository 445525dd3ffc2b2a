"""Which layout a head's folder has: by marks of its config and by tensor names, or by the name that the caller gives.

Kinds of heads that can't be run are refused by name here, before any reader guesses.
"""

from __future__ import annotations

from typing import Any

from specdec.draft.block.formats import deepspec, zlab
from specdec.draft.block.formats import modelopt as modelopt_blocks
from specdec.draft.block.formats import specforge as specforge_peagle
from specdec.draft.block.formats import speculators as speculators_blocks
from specdec.draft.eagle.formats import modelopt, safeailab, specforge, speculators, torchspec
from specdec.draft.formats.reading import HeadFiles, HeadFormat, ParsedHead
from specdec.draft.formats.releases import MARK, refuse_kind
from specdec.models.checkpoints.config_values import mapping
from specdec.models.config import ModelConfig

BLOCK_MARKS = ("hidden_norm.weight", "mask_hidden")  # tensors of heads of one pass alone


def _read_speculators(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    refuse_kind(files.raw, files.where)
    kind = files.raw[MARK]
    if kind == "eagle":
        return speculators.read_eagle1(files, target)
    return (speculators if kind == "eagle3" else speculators_blocks).read(files, target)


def _read_specforge(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    if "mask_hidden" in files.checkpoint:
        return specforge_peagle.read(files, target)
    return (zlab.read_specforge if is_block(files) else specforge.read)(files, target)


def _read_modelopt(files: HeadFiles, target: ModelConfig | None) -> ParsedHead:
    return (modelopt_blocks if is_block(files) else modelopt).read(files, target)


def is_block(files: HeadFiles) -> bool:
    """Whether the tensors are those of a head of one pass."""
    return any(mark in files.checkpoint for mark in BLOCK_MARKS)


FORMATS: dict[str, HeadFormat] = {
    "safeailab": safeailab.FORMAT,
    "specforge": HeadFormat("specforge", "SpecForge", "EAGLE-3, EAGLE-3.1, P-EAGLE, DFlash, DSpark", _read_specforge),
    "speculators": HeadFormat(
        "speculators", "speculators (Red Hat, vLLM)", "EAGLE-1, EAGLE-3, P-EAGLE, DFlash, DFlash2, DSpark", _read_speculators
    ),
    "modelopt": HeadFormat("modelopt", "NVIDIA ModelOpt", "EAGLE-3, DFlash, DSpark", _read_modelopt),
    "torchspec": torchspec.FORMAT,
    "z-lab": zlab.FORMAT,
    "deepspec": deepspec.FORMAT,
}
BESIDE = {  # files of heads that can't be loaded, and what to do instead
    "adapter_config.json": "adapters can't be loaded; nearest thing that works: the head with its adapter merged into it",
}
# Kinds of other heads, by a part of a tensor's name that no EAGLE head has.
OTHER_KINDS = (
    ("prefix_gru.", "a Domino head"),
    ("lilicorr_", "a LiLiCorr head"),
    ("medusa", "a Medusa head"),
    ("eh_proj", "a head of multi-token prediction (MTP)"),
    ("mtp.", "a head of multi-token prediction (MTP)"),
    ("mtp_layers", "a head of multi-token prediction (MTP)"),
)
# Layouts of EAGLE heads that can't be read, by the class that their config names.
OTHER_LAYOUTS = {
    "Qwen3Eagle3Model": "DeepSpec", "Gemma4Eagle3Model": "DeepSpec",
    "LlamaEagle3DraftModel": "NeMo, which does not say which of the target's layers a head reads",
    "DeepseekV3Eagle3DraftModel": "NeMo, which does not say which of the target's layers a head reads",
}  # fmt: skip


def detect(files: HeadFiles) -> HeadFormat:
    """The layout.  ValueError for heads that can't be run, and where two layouts' marks clash."""
    raw, names = files.raw, files.checkpoint.names()
    if raw.get(MARK) is not None:
        refuse_kind(raw, files.where)
    _refuse_others(files)
    if raw.get(MARK) is not None:
        return FORMATS["speculators"]
    if is_block(files):
        return FORMATS[_block_layout(raw, files.where)]
    if modelopt.MARK in mapping(raw, "eagle_config", files.where):
        return FORMATS["modelopt"]
    if _architecture(raw) in torchspec.ARCHITECTURES:
        return torchspec.FORMAT
    if raw.get("fc_norm") is not None or raw.get("norm_output") is not None:
        return FORMATS["specforge"]
    architecture = _architecture(raw)
    has_ids = mapping(raw, "eagle_config", files.where).get(safeailab.AUX) is not None
    only_there = set(mapping(raw, "eagle_config", files.where)) <= set(specforge.NESTED)
    if architecture == "LlamaForCausalLMEagle3" and has_ids and only_there and "t2d" in names:
        return FORMATS["specforge"]
    if name := next((name for name in names if name in ("layers.0.hidden_norm.weight", "midlayer.0.hidden_norm.weight")), None):
        raise ValueError(
            f"{files.folder}: {name} is a name of speculators' or ModelOpt's layout, but the config has the marks of neither; "
            "nearest thing that works: name the layout by draft_format (--draft-format)"
        )
    return safeailab.FORMAT


def _block_layout(raw: dict[str, Any], where: str) -> str:
    """The layout of a head of one pass that is not speculators'."""
    nested = mapping(raw, zlab.NESTED_NAME, where)
    match _architecture(raw):
        case deepspec.ARCHITECTURE:
            return "deepspec"
        case specforge_peagle.ARCHITECTURE | "DSparkDraftModel":
            return "specforge"
        case "DFlashDraftModel" if nested.get(modelopt_blocks.MARK) is not None or nested.get("projector_type") == "dspark":
            return "modelopt"
        case architecture if architecture in zlab.ARCHITECTURES:
            return "z-lab"
    raise ValueError(
        f"{where}: the tensors are those of a head of one pass, but architectures {raw.get('architectures')!r} is not that "
        "of a layout that can be read"
    )


def _refuse_others(files: HeadFiles) -> None:
    raw, where = files.raw, files.where
    for part, kind in OTHER_KINDS:
        if found := next((name for name in files.checkpoint.names() if part in name), None):
            raise ValueError(f"{files.folder}: tensor {found!r} is that of {kind}, which can't be run yet")
    if layout := OTHER_LAYOUTS.get(_architecture(raw)):
        raise ValueError(f"{where}: architectures {raw['architectures']} is the layout of {layout}, which can't be read yet")
    if raw.get("target_layer_ids") is not None and not is_block(files):
        raise ValueError(f"{where}: target_layer_ids is a key of DeepSpec's layout, of which EAGLE heads can't be read yet")
    for name, instead in BESIDE.items():
        if (files.folder / name).is_file():
            raise ValueError(f"{files.folder / name} must be absent: {instead}")


def _architecture(raw: dict[str, Any]) -> str:
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""
