"""When our kernels run, and how they chain.  Shared by every room that launches Triton; knows no kernel.

Chaining (programmatic dependent launch, Hopper and later): a kernel is launched while its predecessor still runs.  It may
first touch what no kernel of this run writes (weights), then waits for the predecessor with `gdc_wait`, and only then lets
its own successor start with `gdc_launch_dependents`.  So whoever starts may rely on everything before its predecessor.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def use_kernels(x: Tensor) -> bool:
    """Whether our kernels compute on x: on a GPU, in a dtype that they know, with no gradient to record."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES and not torch.is_grad_enabled() and has_triton()


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels can be chained by programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def chained(device: torch.device) -> dict[str, Any]:
    """Launch options of a chained kernel: its PDL constexpr, and the launch attribute where the GPU has it."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(device) else {"PDL": False}
