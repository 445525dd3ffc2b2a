"""Which layout a head's folder has: by marks of its config and by tensor names, or by the name that the caller gives.

Kinds of heads that can't be run are refused by name here, before any reader guesses.
"""

from __future__ import annotations

from typing import Any

from specdec.draft.eagle.formats import modelopt, safeailab, specforge, speculators
from specdec.draft.formats.reading import Format, HeadFiles
from specdec.models.checkpoints.config_values import mapping

FORMATS: dict[str, Format] = {each.NAME: each.FORMAT for each in (safeailab, specforge, speculators, modelopt)}
# Kinds of other heads, by a part of a tensor's name that no EAGLE head has.
OTHER_KINDS = (
    ("markov", "a DSpark head"),
    ("candidate_selector.", "a DFlash2 head"),
    ("prefix_gru.", "a Domino head"),
    ("lilicorr_", "a LiLiCorr head"),
    ("mask_hidden", "a P-EAGLE head"),
    ("medusa", "a Medusa head"),
    ("eh_proj", "a head of multi-token prediction (MTP)"),
    ("mtp.", "a head of multi-token prediction (MTP)"),
    ("mtp_layers", "a head of multi-token prediction (MTP)"),
    ("kv_a_proj", "a head with latent attention (MLA)"),
)
# Layouts of EAGLE heads that can't be read, by the class that their config names.
OTHER_LAYOUTS = {
    "Qwen3Eagle3Model": "DeepSpec", "Gemma4Eagle3Model": "DeepSpec", "LlamaEagle3DraftModel": "NeMo",
    "Eagle3DeepseekV2ForCausalLM": "ModelOpt with latent attention",
}  # fmt: skip


def detect(files: HeadFiles) -> Format:
    """The layout.  ValueError for heads that can't be run, and where two layouts' marks clash."""
    raw, names = files.raw, files.checkpoint.names()
    _refuse_others(files)
    if raw.get(speculators.MARK) is not None:
        return speculators.FORMAT
    if modelopt.MARK in mapping(raw, "eagle_config", files.where):
        return modelopt.FORMAT
    if raw.get("fc_norm") is not None or raw.get("norm_output") is not None:
        return specforge.FORMAT
    architecture = _architecture(raw)
    has_ids = mapping(raw, "eagle_config", files.where).get(safeailab.AUX) is not None
    only_there = set(mapping(raw, "eagle_config", files.where)) <= set(specforge.NESTED)
    if architecture == "LlamaForCausalLMEagle3" and has_ids and only_there and "t2d" in names:
        return specforge.FORMAT
    if name := next((name for name in names if name in ("layers.0.hidden_norm.weight", "midlayer.0.hidden_norm.weight")), None):
        raise ValueError(
            f"{files.folder}: {name} is a name of speculators' or ModelOpt's layout, but the config has the marks of neither; "
            "nearest thing that works: name the layout by draft_format (--draft-format)"
        )
    return safeailab.FORMAT


def _refuse_others(files: HeadFiles) -> None:
    raw, where = files.raw, files.where
    for part, kind in OTHER_KINDS:
        if found := next((name for name in files.checkpoint.names() if part in name), None):
            raise ValueError(f"{files.folder}: tensor {found!r} is that of {kind}, which can't be run yet")
    if "hidden_norm.weight" in files.checkpoint:
        raise ValueError(f"{files.folder}: tensor 'hidden_norm.weight' is that of a DFlash head, which can't be run yet")
    if layout := OTHER_LAYOUTS.get(_architecture(raw)):
        raise ValueError(f"{where}: architectures {raw['architectures']} is the layout of {layout}, which can't be read yet")
    if raw.get("target_layer_ids") is not None:
        raise ValueError(f"{where}: target_layer_ids is a key of DeepSpec's layout, which can't be read yet")
    for name in ("adapter_config.json", "hf_quant_config.json"):
        if (files.folder / name).is_file():
            raise ValueError(f"{files.folder / name} must be absent: adapters and quantised heads can't be loaded")


def _architecture(raw: dict[str, Any]) -> str:
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""
