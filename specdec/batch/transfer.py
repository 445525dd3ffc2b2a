"""Copies of numbers from the host to a device, from pinned memory on a GPU, so that nobody waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Numbers = Sequence[float] | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory on the host for a copy to the device: copies out of older memory may be under way."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda", device="cpu")


def to_device(numbers: Numbers, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """The numbers, on the device."""
    device = torch.device(device)
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=pinned, device="cpu").to(device, non_blocking=True)
