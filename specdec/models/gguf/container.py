"""The bytes of a GGUF file's header: keys and where tensors lie.  Knows the container (version 2 and 3) and no model.

The package `gguf` reads the same; it makes an array of numpy for each token and merge, which takes 9 s of every start with a
vocabulary of Llama 3's size, and this file 0.35 s (benchmarks/products/README.md).  Tests hold it against the package.

The layout is that of docs/gguf.md (ggml).  Every file that is cut off or junk is a ValueError that says at which byte.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
MAX_DIMENSIONS = 4  # of a tensor
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct's, by number
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


class TensorEntry(NamedTuple):
    """A tensor in the header.  type: ggml's number.  shape: rows before columns.  offset: from `Header.data`."""

    type: int
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """data: the byte of the file from which tensors' offsets are counted.  alignment: what these are multiples of."""

    keys: dict[str, Any]
    tensors: dict[str, TensorEntry]
    data: int
    alignment: int


class Cursor:
    """Reads values one after the other.  ValueError where the bytes end, or can't be what they should."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        """count numbers of struct's form, little-endian."""
        size = count * struct.calcsize(f"<{form}")
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends at byte {len(self.data)}, within a value that begins at byte {self.at}")
        found = struct.unpack_from(f"<{count}{form}", self.data, self.at)
        self.at += size
        return found

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def string(self) -> str:
        begin = self.at + 8
        end = begin + self.number("Q")
        if end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, within a text that begins at byte {begin}")
        self.at = end
        try:
            return str(self.data[begin:end], "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the text at byte {begin} is not UTF-8: {error}") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._scalars(kind, 1)[0]
        of, count = self.numbers("I")[0], self.number("Q")
        if of == _STRING:
            if count > len(self.data) // 8:  # each has eight bytes of its length at least
                raise ValueError(f"the list before byte {self.at} has {count} texts, more than the file can hold")
            return [self.string() for _ in range(count)]
        return self._scalars(of, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            what = "a list of lists" if kind == _ARRAY else f"of type {kind}, which is none of GGUF's"
            raise ValueError(f"the value at byte {self.at} is {what}")
        found = list(self.numbers(_SCALARS[kind], count))
        # The shortest number that float32 rounds to the same: 1e-05 was meant, and not 9.999999747378752e-06.
        return [float(str(each)) for each in np.array(found, np.float32)] if kind == _FLOAT32 else found


def read_header(data: memoryview) -> Header:
    """ValueError says what is wrong with the bytes."""
    if bytes(data[:4]) != MAGIC:
        raise ValueError(f"it begins with {bytes(data[:4])!r}, expected {MAGIC!r}")
    cursor = Cursor(data)
    cursor.at = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = " (of a big-endian machine?)" if version >> 16 else ""
        raise ValueError(f"it is of version {version}{swapped}, expected {' or '.join(map(str, VERSIONS))}")
    tensor_count, key_count = cursor.numbers("Q", 2)
    keys: dict[str, Any] = {}
    for _ in range(key_count):
        name = cursor.string()
        if name in keys:
            raise ValueError(f"the key {name} stands there twice")
        keys[name] = cursor.value(cursor.number("I"))
    tensors: dict[str, TensorEntry] = {}
    for _ in range(tensor_count):
        name = cursor.string()
        if name in tensors:
            raise ValueError(f"the tensor {name!r} stands there twice")
        dimensions = cursor.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"the tensor {name!r} has {dimensions} dimensions, expected at most {MAX_DIMENSIONS}")
        shape = tuple(reversed(cursor.numbers("Q", dimensions)))
        tensors[name] = TensorEntry(cursor.number("I"), shape, cursor.number("Q"))
    alignment = keys.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise ValueError(f"general.alignment must be a multiple of 8, got {alignment!r}")
    return Header(keys, tensors, -(-cursor.at // alignment) * alignment, alignment)
