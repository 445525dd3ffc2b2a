"""Wrappers that transformers 5 saved, written anew as older releases or their publishers call tensors and keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def _nested(name: str) -> str:
    """Of files with `language_model.model.`, as transformers 5 calls modules."""
    if name.startswith("language_model."):
        return name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
    return f"model.{name}"


def _nested_bare(name: str) -> str:
    """The same, of files with `model.` and `visual.`."""
    if name.startswith("model."):
        return name.replace("model.", "model.language_model.", 1)
    return name if name.startswith("lm_head") else f"model.{name}"


def _by_columns(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return name, tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor


def _same(raw: dict[str, Any]) -> dict[str, Any]:
    return raw


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """As Qwen2-VL's own: the text model's keys at the top, the rope of transformers 4."""
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return {**text, **raw, "rope_theta": rope["rope_theta"], "rope_scaling": scaling, "vision_token_id": 5}


def _twice(raw: dict[str, Any]) -> dict[str, Any]:
    """As transformers 4.53 saved Qwen2.5-VL: the text model's keys inside, and once more outside."""
    text = {key: value for key, value in raw["text_config"].items() if key != "model_type"}
    return {**text, **raw, "dtype": "float32"}


def _kimi(raw: dict[str, Any]) -> dict[str, Any]:
    """As Moonshot's own: transformers 4's keys within the config inside, and other names of its own."""
    noise = {"_name_or_path": "", "add_cross_attention": False, "bad_words_ids": None, "id2label": {"0": "A"}, "top_k": 50}
    model = {"model_type": "kimi_k2", "ep_size": 1, "seq_aux": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    media = {
        "media_placeholder_token_id": 3,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<v>",
        "ignore_index": -1,
    }
    kept = {key: value for key, value in raw.items() if key not in ("image_token_id", "video_token_id")}
    return {**kept, **media, "text_config": {**raw["text_config"], **noise, **model}}


Renamed = Callable[[str, Tensor], tuple[str, Tensor]]
# By model_type, and what is meant where there are several.
PUBLISHED: dict[str, tuple[Renamed, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "qwen3_vl_moe": (_by_columns, _same),
    "llava": (lambda name, x: (_nested(name), x), _same),
    "gemma3": (lambda name, x: (_nested(name), x), _same),
    "mistral3": (lambda name, x: (_nested(name), x), lambda raw: {**raw, "language_model_only": True}),
    "llama4": (lambda name, x: (name.replace("vision_model.", "model.vision_model."), x), _same),
    "kimi_k25": (lambda name, x: (name.replace("language_model.model.blocks.", "language_model.model.layers."), x), _kimi),
    "qwen2_vl": (lambda name, x: (name, x), _flat),
    "qwen2_5_vl nested": (lambda name, x: (_nested_bare(name), x), _twice),
}


def as_published(name: str, saved: Path, folder: Path) -> None:
    renamed, said = PUBLISHED[name]
    folder.mkdir()
    tensors = dict(renamed(each, x) for each, x in load_file(saved / "model.safetensors").items())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(said(json.loads((saved / "config.json").read_text()))))
