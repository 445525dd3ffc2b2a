"""Finds and opens the weight files of a model folder: names, shapes and a way to read each tensor, without reading any yet.

Every file that is missing, cut off or junk is a ValueError that names it.  Knows files, not architectures.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from specdec.models.checkpoints.config_values import mapping, one_line
from specdec.models.checkpoints.mistaken import file_hint, weights_hint
from specdec.models.checkpoints.stored import StoredTensor
from specdec.models.config import read_json
from specdec.models.gguf.file import is_gguf
from specdec.models.gguf.tensors import gguf_tensors

_LAYOUTS = (("model", ".safetensors"), ("pytorch_model", ".bin"))  # safetensors before pickles


def stored_tensors(
    folder: Path, pickles: bool = True, as_blocks: Callable[[str], bool] = lambda matrix: False
) -> dict[str, StoredTensor]:
    """Every tensor of the folder's weight files, or of a GGUF file, by name.

    pickles: whether they may be pickles.  as_blocks: of a GGUF file, the matrices that are asked for as ggml's blocks.
    """
    if is_gguf(folder):
        return gguf_tensors(folder, as_blocks)
    files = _weight_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no weights: expected *.safetensors (or pytorch_model*.bin){weights_hint(folder)}")
    if not pickles and (file := next((file for file in files if file.suffix != ".safetensors"), None)):
        raise ValueError(
            f"{file} is a pickle, which is not opened unless you ask for it; nearest thing that works: a safetensors file, or "
            "draft_pickle=True (--draft-pickle)"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        held = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
        if twice := sorted(tensors.keys() & held.keys()):
            raise ValueError(f"{file}: tensor {twice[0]!r} stands in {tensors[twice[0]].file.name} too; expected each once")
        tensors.update(held)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """The shards that an index names, or else the single files."""
    for stem, suffix in _LAYOUTS:
        index = folder / f"{stem}{suffix}.index.json"
        if index.is_file():
            return _shards(index)
        if (folder / f"{stem}{suffix}").is_file():
            return [folder / f"{stem}{suffix}"]
    return sorted(folder.glob("*.safetensors"))


def _shards(index: Path) -> list[Path]:
    """The files an index names, each of them inside the index's own folder."""
    weight_map = mapping(read_json(index), "weight_map", str(index))
    if not weight_map:
        raise ValueError(f"{index} has no weight_map: expected an object of tensor names and the files that hold them")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith((".safetensors", ".bin")):
            raise ValueError(f"{index}: weight_map must give {name!r} a .safetensors or .bin file, got {shard!r}")
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            raise ValueError(f"{index}: weight_map must name files inside its own folder, got {shard!r} for {name!r}")
    shards = sorted(set(weight_map.values()))
    if absent := [shard for shard in shards if not (index.parent / shard).is_file()]:
        raise ValueError(f"{index} names files that do not exist: {', '.join(absent)}")
    return [index.parent / shard for shard in shards]


def _safetensors(file: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    if file.exists() and not file.is_file() and not file.is_dir():  # opening a pipe would wait for whoever writes into it
        raise ValueError(f"{file}: expected a safetensors file, got a pipe or a device")
    try:
        handle = safe_open(file, framework="pt")
        names = list(handle.keys())
    except (SafetensorError, ValueError) as error:
        why = file_hint(file) or "was its download cut off?"
        raise ValueError(f"{file} is no whole safetensors file ({error}); {why}") from error
    except OSError as error:
        what = "a folder" if file.is_dir() else str(error)
        raise ValueError(f"{file}: expected a safetensors file that can be read, got {what}") from error

    def read(name: str) -> Tensor:
        try:
            return handle.get_tensor(name)
        except (SafetensorError, AttributeError) as error:  # AttributeError: torch has no such dtype
            raise ValueError(f"{file}: tensor {name!r} can't be read: {error}") from error

    def stored(name: str) -> StoredTensor:
        header = partial(handle.get_slice, name)
        return StoredTensor(file, lambda: tuple(header().get_shape()), lambda: header().get_dtype(), lambda: read(name))

    return {name: stored(name) for name in names}


def _pickled(file: Path) -> dict[str, StoredTensor]:
    tensors: Any
    try:
        # Files of torch before 1.6 are no zip archives, and can't be mapped into memory.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except OSError:
        raise
    except Exception as error:  # of any kind: pickle runs whatever the bytes happen to say
        first = str(error).partition(". ")[0]  # what follows advises to unpickle the file without a check
        what = one_line(ValueError(first or type(error).__name__))
        why = file_hint(file) or "was its download cut off?"
        raise ValueError(f"{file} is no whole file of torch tensors ({what}); {why}") from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise ValueError(f"{file} must hold a dict of tensors by name, got {type(tensors).__name__}")
    if other := [name for name, value in tensors.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{file} must hold tensors alone, got {type(tensors[other[0]]).__name__} for {other[0]!r}")

    def stored(tensor: Tensor) -> StoredTensor:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return StoredTensor(file, lambda: tuple(tensor.shape), lambda: dtype, lambda: tensor)

    return {name: stored(tensor) for name, tensor in tensors.items()}
