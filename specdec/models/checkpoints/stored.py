"""One tensor of a weight file, of any kind of file: what its header says, and how its numbers are read when they are wanted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

SAFE_DTYPES = {  # of safetensors' names, that of a tensor that torch makes of one
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """One tensor of a file.  shape, dtype: from the file's header, by its own name.  read: the tensor itself, on the CPU."""

    file: Path
    shape: Callable[[], tuple[int, ...]]
    dtype: Callable[[], str]
    read: Callable[[], Tensor]

    @property
    def kind(self) -> Literal["floating-point numbers", "integers", "complex numbers"]:
        name = self.dtype().lower()
        if name.startswith(("f", "bf")):  # F32, BF16, F8_E4M3, float32, bfloat16
            return "floating-point numbers"
        return "complex numbers" if name.startswith("c") else "integers"  # I64, U8, BOOL, int64, uint8, bool

    @property
    def itemsize(self) -> int:
        """Bytes of one of its numbers."""
        bits = re.search(r"\d+", self.dtype())  # F32, F8_E4M3, bfloat16
        return int(bits[0]) // 8 if bits else 1

    def on_meta(self) -> Tensor:
        """What `read` returns, but on torch's meta device, by the header alone; of dtypes that are rare it is read."""
        name = self.dtype()
        dtype = SAFE_DTYPES.get(name) or getattr(torch, name, None)
        return self.read().to("meta") if dtype is None else torch.empty(self.shape(), dtype=dtype, device="meta")
