"""When our kernels run, and how they chain.  Shared by every room that launches Triton; knows no kernel.

Chaining (programmatic dependent launch, Hopper and later): a kernel is launched while its predecessor still runs.  It may
first touch what no kernel of this run writes (weights), then waits with `gdc_wait` until its predecessor is complete.  Since
every kernel waits, all before the predecessor is complete by then too, so memory is reused as if nothing overlapped.
`gdc_launch_dependents` lets the successor start, as early as its own waiting allows: before the wait, where the successor
waits before it reads what is new (2 to 3 percent of a decode step on an H100).  Attention's kernels read more than weights
before they wait: their tables, which were complete before the norm in front of the layer's projections; and the merge also
the queries and the tree's keys, so the paged kernel in front of it lets it start only behind its own wait.
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
