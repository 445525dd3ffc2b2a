"""Where a module that is being made takes its memory, in which dtype, and whether its matrices take any before they are filled.

torch has defaults of its own for device and dtype.  The dtype is the whole process's, so setting it for a model that is loaded
would change what a decoder beside it computes, and reading it would take what somebody else has set.  Here they are values of
this context (contextvars), which no other thread sees, and torch's own are never asked.  Knows no module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import nn


class Making(NamedTuple):
    """late: whether matrices take memory as they are filled, when it is known in how many bits they are stored."""

    device: torch.device
    dtype: torch.dtype
    late: bool = False


OUTSIDE = Making(torch.device("cpu"), torch.float32)
_MAKING: ContextVar[Making] = ContextVar("making", default=OUTSIDE)


@contextmanager
def making(device: torch.device, dtype: torch.dtype, late: bool = False) -> Iterator[None]:
    """Inside, modules are made there, in that dtype.  Outside, they are made on the CPU, in float32."""
    token = _MAKING.set(Making(device, dtype, late))
    try:
        yield
    finally:
        _MAKING.reset(token)


def made_now() -> Making:
    """How modules are made here."""
    return _MAKING.get()


def new_weight(*size: int, late: bool = False) -> nn.Parameter:
    """Uninitialised numbers for a loader to fill.  late: they take no memory, on torch's meta device."""
    now = made_now()
    return nn.Parameter(torch.empty(size, dtype=now.dtype, device="meta" if late else now.device))
