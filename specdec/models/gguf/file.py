"""Opens a GGUF file: its keys as plain values, and the bytes of each tensor.  Knows no architecture.

Every file that is missing, cut off or junk, and every type of tensor that can't be read, is a ValueError that names it.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.models.gguf.blocks import BLOCKS, FLOATS
from specdec.models.gguf.container import Header, read_header

SUFFIX = ".gguf"
_PIECE = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # of a model that was split into several files
_TYPES = {  # by ggml's number; those of no block that is known here are refused by their names
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


class GgufTensor(NamedTuple):
    """One tensor of a file.

    type: ggml's name of its blocks, such as Q4_K, or F32.  shape: rows before columns, as torch has it.
    start: its first byte in the file.  row_bytes: the bytes of all blocks of a row.
    """

    type: str
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.start + self.rows * self.row_bytes


class GgufFile(NamedTuple):
    """path: of the file.  state: what the file system said of it then.  keys: its metadata.  tensors: by their names there."""

    path: Path
    state: tuple[int, int, int]
    keys: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        name = self.keys.get("general.architecture")
        if not isinstance(name, str):
            raise ValueError(f"{self.path}: general.architecture must name the model's architecture, got {name!r}")
        return name

    @property
    def vocab_size(self) -> int:
        """The rows of the embedding table."""
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            found = "none" if embedding is None else f"one of shape {embedding.shape}"
            raise ValueError(f"{self.path}: tensor 'token_embd.weight' must be a matrix, a row for each token, got {found}")
        return embedding.shape[0]

    def read(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8 [rows, bytes of a row], in memory of their own.  ValueError if the file has changed."""
        tensor = self.tensors[name]
        count = tensor.rows * tensor.row_bytes
        with self.path.open("rb") as file:
            if _state(os.fstat(file.fileno())) != self.state:
                raise ValueError(
                    f"{self.path} was changed or replaced while it was read; nearest thing that works: load it again"
                )
            return np.fromfile(file, np.uint8, count, offset=tensor.start).reshape(tensor.rows, tensor.row_bytes)


def is_gguf(place: Path) -> bool:
    """Whether a target is in a GGUF file, by the file's name."""
    return place.suffix.lower() == SUFFIX and not place.is_dir()


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder without weights in Hugging Face layout; None if there is none.

    ValueError if there are several, of which each may be a whole model.
    """
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return None
    found = sorted(file for file in folder.iterdir() if is_gguf(file))
    if len(found) > 1 and not all(_PIECE.search(file.name) for file in found):
        names = ", ".join(file.name for file in found[:8])
        raise ValueError(f"{folder} holds {len(found)} GGUF files ({names}); expected one: name the file that is meant")
    return found[0] if found else None


def open_gguf(path: Path) -> GgufFile:
    """Reads the header.  ValueError if the file can't be read or holds types that can't."""
    if (piece := _PIECE.search(path.name)) and int(piece[2]) > 1:
        raise ValueError(
            f"{path} is piece {int(piece[1])} of {int(piece[2])} of a model; nearest thing that works: one file, as "
            "llama-gguf-split --merge makes of them"
        )
    try:
        return _opened(path, _state(path.stat()))
    except OSError as error:
        raise ValueError(f"{path}: expected a GGUF file that can be read, got {error}") from error


@lru_cache(maxsize=2)  # a start asks several times for what may take half a second; what the file system says is the key
def _opened(path: Path, state: tuple[int, int, int]) -> GgufFile:
    (_, _, size), tensors = state, {}
    header = _header(path, size)
    for name, found in header.tensors.items():
        kind, start = _TYPES.get(found.type, f"number {found.type}"), header.data + found.offset
        if kind not in BLOCKS and kind not in FLOATS:
            raise ValueError(
                f"{path}: tensor {name!r} is stored as {kind}; expected one of {', '.join((*FLOATS, *BLOCKS))}; nearest thing "
                "that works: the same model in one of these"
            )
        columns, bytes = (1, FLOATS[kind].itemsize) if kind in FLOATS else BLOCKS[kind][:2]
        if not found.shape or 0 in found.shape or found.shape[-1] % columns:
            raise ValueError(f"{path}: tensor {name!r} of {kind} must have rows of whole blocks, got shape {found.shape}")
        tensors[name] = GgufTensor(kind, found.shape, start, found.shape[-1] // columns * bytes)
        if tensors[name].end > size:
            ends = f"tensor {name!r} ends at byte {tensors[name].end}"
            raise ValueError(f"{path} has {size} bytes, but {ends}; was its download cut off?")
    _check_places(path, tensors, header.alignment)
    return GgufFile(path, state, header.keys, tensors)


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _check_places(path: Path, tensors: dict[str, GgufTensor], alignment: int) -> None:
    """ValueError if a tensor begins where none may, or within another one."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start % alignment or tensor.start < end:
            raise ValueError(
                f"{path}: tensor {name!r} must begin at a multiple of {alignment}, and after byte {end}, where the one "
                f"before it ends, got byte {tensor.start}: the file is broken"
            )
        end = tensor.end


def _header(path: Path, size: int) -> Header:
    if not size:
        raise ValueError(f"{path} is empty, expected a GGUF file; was its download cut off?")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            with memoryview(mapped) as data:
                return read_header(data)
    except ValueError as error:
        hint = "; was its download cut off?" if "it ends at byte" in str(error) else ""
        raise ValueError(f"{path} is no whole GGUF file: {error}{hint}") from error
