"""Reads a model folder strictly: every tensor in it is used or is an error, every tensor wanted is found or is an error.

Knows files and names, not architectures; see `loader.py` for what a target takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_ELSEWHERE = ["original/*", "consolidated*"]  # the same weights once more, in Meta's and Mistral's own layouts


def resolve_folder(name: str | Path, argument: str) -> Path:
    """A local folder as it is; anything else is a hub id, fetched through huggingface_hub.  argument: for errors."""
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"{argument} must be a folder or a hub id, a str or a Path; got {name!r} of type {type(name).__name__}")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"expected a model folder or a hub id, got the file {str(name)!r}; nearest: {str(path.parent)!r}")
    text = str(name)
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise ValueError(f"expected an existing model folder or a hub id like 'org/name', got {text!r}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(text, allow_patterns=_PATTERNS, ignore_patterns=_ELSEWHERE))
        if not any(folder.glob("*.safetensors")):  # heads are often published as pickles only
            folder = Path(snapshot_download(text, allow_patterns=[*_PATTERNS, "*.bin"], ignore_patterns=_ELSEWHERE))
        return folder
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"{text!r} is no local folder, and the hub did not give it: {error}") from error


class Checkpoint:
    """The tensors of one folder, by name; remembers which were taken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[str, Callable[[], Tensor]] = {}
        files = _weight_files(folder)
        if not files:
            raise ValueError(f"{folder} holds no weights: expected *.safetensors (or pytorch_model*.bin)")
        for file in files:
            self._add(file)
        self._untaken = set(self._readers)

    def __contains__(self, name: str) -> bool:
        return name in self._readers

    def names(self) -> list[str]:
        return sorted(self._readers)

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor of that name (and shape); it counts as used."""
        if name not in self._readers:
            have = ", ".join(self.names()[:8])
            raise ValueError(f"{self.folder}: tensor {name!r} is missing; the checkpoint holds {have}, ...")
        tensor = self._readers[name]()
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{self.folder}: tensor {name!r} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
        self._untaken.discard(name)
        return tensor

    def ignore(self, suffix: str) -> None:
        """Declares tensors with that ending as known and harmless."""
        self._untaken = {name for name in self._untaken if not name.endswith(suffix)}

    def finish(self) -> None:
        """ValueError if the checkpoint holds a tensor nobody took: it would change the model if it were used."""
        if self._untaken:
            names = sorted(self._untaken)
            raise ValueError(f"{self.folder}: {len(names)} tensors are not part of this architecture: {', '.join(names[:8])}")

    def _add(self, file: Path) -> None:
        if file.suffix == ".safetensors":
            from safetensors import SafetensorError, safe_open

            try:
                handle = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file} is no whole safetensors file ({error}); was its download cut off?") from error
            self._readers.update({name: lambda n=name: handle.get_tensor(n) for name in handle.keys()})
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            self._readers.update({name: lambda n=name: tensors[n] for name in tensors})


def _weight_files(folder: Path) -> list[Path]:
    """The shards an index names, or else the single files; safetensors before pickles."""
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index = folder / f"{stem}{suffix}.index.json"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            absent = [shard for shard in shards if not (folder / shard).is_file()]
            if absent:
                raise ValueError(f"{index} names files that do not exist: {', '.join(absent)}")
            return [folder / shard for shard in shards]
        if (folder / f"{stem}{suffix}").is_file():
            return [folder / f"{stem}{suffix}"]
    return sorted(folder.glob("*.safetensors"))
