"""Notices what was likelier meant: a head for a target, a model for a head, a folder of another kind, a name with a slip in it.

Knows the marks of each, in names of files, config keys, tensor names and first bytes, and nothing that would load them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from specdec.checks import nearest_name

_HEAD_KEYS = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "speculators_model_type")
_HEAD_TENSORS = ("fc.weight", "fusion_fc.weight", "d2t")  # no target has them at its top
_MTP = (".hnorm.", ".mtp_layers.")  # in the names of MTP layers
_TARGET_PREFIXES = (
    *("model.embed_tokens.", "model.layers.", "transformer.", "gpt_neox.", "backbone.layers.", "backbone.embeddings."),
    *("model.language_model.layers.", "language_model.model.layers."),  # of wrappers of texts and images
)
_OWN_TARGET = "nearest thing that works: the model that this head drafts for as target, and this folder as its draft"
# Files that say what a folder without config.json is, and what to do with it.
_OTHER_KINDS = (
    (
        "adapter_config.json",
        "is an adapter (LoRA); nearest thing that works: merge it into its model, and give that folder",
    ),
    ("params.json", "is in a layout of its publisher's own; nearest thing that works: the same model in Hugging Face layout"),
    ("model_index.json", "is a pipeline of diffusers, no language model"),
    ("mlx_model.json", "is a model of MLX; nearest thing that works: the same model in Hugging Face layout"),
    ("refs", "is the hub's cache of a model; nearest thing that works: {snapshot}"),
    ("snapshots", "is the hub's cache of a model; nearest thing that works: {snapshot}"),
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".h5", ".onnx", ".msgpack", ".npz", ".gguf")
_URL = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_LISTED = 2000  # entries of a folder that are looked through


# ---- heads and targets ----


def refuse_head_config(raw: dict[str, Any], path: Path) -> None:
    """ValueError if a config.json given for a target says that it is a draft head's."""
    if mark := head_mark(raw):
        raise ValueError(f"{path}: expected a target, got a draft head's config ({mark}); {_OWN_TARGET}")


def head_mark(raw: dict[str, Any]) -> str:
    """What of a config.json says that it is a draft head's; empty if nothing does."""
    marks = [key for key in _HEAD_KEYS if raw.get(key) is not None]
    if raw.get("model_type") == "llama" and "bias" in raw:  # a key of EAGLE-1 heads, and of no Llama
        marks.append("bias")
    if str(raw.get("model_type")).endswith("_assistant"):  # Gemma 4's, which read their target's keys and values
        marks.append(f"model_type {raw['model_type']}")
    if any("eagle" in str(name).lower() for name in _as_list(raw.get("architectures"))):
        marks.append(f"architectures {raw['architectures']}")
    return marks[0] if marks else ""


def refuse_head_tensors(names: Iterable[str], folder: Path) -> None:
    """ValueError if the weights of a target are a draft head's: heads of EAGLE-1 have a plain Llama's config."""
    if mark := tensor_mark(names):
        raise ValueError(f"{folder}: expected a target, got a draft head's weights ({mark}); {_OWN_TARGET}")


def tensor_mark(names: Iterable[str]) -> str:
    """Which tensor's name says that the weights are a draft head's; empty if none does."""
    held = set(names)
    marks = [name for name in _HEAD_TENSORS if name in held]
    return marks[0] if marks and not any(name.startswith(_TARGET_PREFIXES) for name in held) else ""


def model_mark(names: Iterable[str]) -> str:
    """Which tensor's name says that the weights are a whole model's, and no draft head's; empty if none does."""
    held = set(names)
    marks = [name for name in sorted(held) if name.startswith(_TARGET_PREFIXES)]
    return marks[0] if marks and not held & set(_HEAD_TENSORS) else ""


def refuse_target_tensors(names: Iterable[str], folder: Path) -> None:
    """ValueError if the weights of a draft head are a whole model's."""
    held = set(names)
    if mark := model_mark(held):
        has_mtp = any(part in name for name in held for part in _MTP)
        own = "draft='mtp' where it is the target, whose own MTP layers then draft, or " if has_mtp else ""
        raise ValueError(
            f"{folder}: expected a draft head, got a whole model's weights ({mark}); nearest thing that works: {own}this "
            "folder as draft= beside a target of its vocabulary, without a draft_format: a small model drafts then"
        )


def refuse_itself(draft: Path, target: Path, instead: Callable[[], str]) -> None:
    """ValueError if the folder that is given for a draft is the target's own.  instead: says which drafter needs none."""
    if draft.exists() and target.exists() and draft.samefile(target):
        raise ValueError(
            f"draft: {draft} is the target itself, and a model does not draft for itself; nearest thing that works: "
            f"{instead()}, or the folder of a head that was trained for it, or of a smaller model of its vocabulary"
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# ---- folders and files ----


def folder_hint(folder: Path) -> str:
    """What a folder without a config.json is, with a "; " in front; empty if that can't be told."""
    if not folder.is_dir():
        return ""
    names = _entries(folder)
    if not names:
        return "; the folder is empty: was its download cut off?"
    for mark, meaning in _OTHER_KINDS:
        if mark in names:
            return f"; the folder {meaning.format(snapshot=_snapshot(folder))}"
    if inside := [name for name in names if (folder / name / "config.json").is_file()]:
        more = "" if len(inside) == 1 else f", which is one of {len(inside)} such folders in it"
        return f"; nearest thing that works: {folder / inside[0]}{more}"
    if any(name in names for name in _VOCABULARIES):
        has = "and weights, but no config" if any(name.endswith(_WEIGHTS) for name in names) else "alone"
        return f"; the folder holds a tokenizer {has}: was its download cut off?"
    if weights := [name for name in names if name.endswith(_WEIGHTS)]:
        return f"; the folder holds weights ({weights[0]}), but nothing says of what: copy the config.json from their source"
    return ""


def weights_hint(folder: Path) -> str:
    """What lies in a folder in place of weights that can be read, with a "; " in front; empty if nothing does."""
    found = [name for name in _entries(folder) if name.endswith((*_WEIGHTS, ".safetensors.index.json"))]
    return f"; it holds {found[0]}, which is not read" if found else ""


def file_hint(path: Path) -> str:
    """What a file that can't be parsed is, by its first bytes; empty if that can't be told."""
    try:
        with path.open("rb") as file:
            begin = file.read(80).lstrip()
    except OSError:
        return ""
    if begin.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, not the file itself: run git lfs pull in that folder"
    if begin[:1] == b"<":
        return "it is a web page: was an address saved in place of the file?"
    return "" if begin else "it is empty: was its download cut off?"


def _snapshot(folder: Path) -> str:
    inside = [folder / "snapshots" / name for name in _entries(folder / "snapshots")]
    return str(inside[-1]) if inside else "download the model again, since it holds no snapshot"


def _entries(folder: Path) -> list[str]:
    """Names in a folder, sorted; none where it can't be read."""
    try:
        with os.scandir(folder) as found:
            return sorted(entry.name for entry, _ in zip(found, range(_MAX_LISTED)))
    except OSError:
        return []


# ---- names ----


def name_hint(text: str) -> str:
    """What may be meant by a name at which there is no folder, with a "; " in front; empty if nothing is alike."""
    bare = text.strip().strip("'\"").strip()
    if match := _URL.match(bare):
        return f"; nearest thing that works: the hub id {match[1]!r}"
    if bare and os.path.islink(bare):
        return f"; it is a link to {os.readlink(bare)}, where nothing is"
    if bare != text and _HUB_ID.fullmatch(bare):
        return f"; nearest thing that works: {bare!r}"
    for other in (bare, os.path.expandvars(bare)):
        if other != text and os.path.isdir(os.path.expanduser(other)):
            return f"; nearest thing that works: {other!r}"
    before, at, _ = bare.partition("@")
    if at and _HUB_ID.fullmatch(before):
        return f"; nearest thing that works: {before!r}, or for another revision the folder of its download"
    path = Path(bare)
    others = [name for name in _entries(path.parent) if name != path.name] if bare and path.parent.is_dir() else []
    if alike := nearest_name(path.name, others):
        return f"; nearest: {str(path.parent / alike)!r}"
    return ""
