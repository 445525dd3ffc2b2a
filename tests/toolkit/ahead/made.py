"""Tensors of the shapes that passes have, on the GPU whose launches are recorded.  They hold nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.caches.quant_cache import FP8_MIN_ARCHITECTURE
from specdec.parallel.symmetric.inbox import Inbox, Layout

VOCABULARY, HIDDEN, PAGE = 128256, 4096, 16
DTYPES = (torch.bfloat16, torch.float16)


def halves(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def floats(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32)


def ids(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int64)


def counts(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32)


def here() -> torch.device:
    """The GPU whose launches are being recorded."""
    return floats(0).device


def may_be_deterministic() -> bool:
    """As loading/resolve.py has it."""
    return torch.cuda.get_device_capability(here())[0] == 9


def has_float8() -> bool:
    return torch.cuda.get_device_capability(here()) >= FP8_MIN_ARCHITECTURE


def inbox_of(ranks: int) -> Inbox:
    layout = Layout(ranks)
    return Inbox(layout, ids(ranks + 1), counts(layout.channels), counts(1))
