"""When our kernels run, and how they chain.  Shared by every room that launches Triton; knows no kernel.

Chaining (programmatic dependent launch, Hopper and later): a kernel is launched while its predecessor still runs, does what
needs nothing new, waits with `gdc_wait` until the predecessor is complete, and goes on.  Since every kernel waits, all before
the predecessor is complete by then too, so memory is reused as if nothing overlapped.
- Before its wait a kernel may read only what was complete before the predecessor began to wait for its own: weights; in
  attention also the tables, which are older than the norm in front of the layer's projections.
- `gdc_launch_dependents` lets the successor start.  It comes before the kernel's own wait (2 to 3 percent of a decode step on
  an H100), except in the products and the paged attention kernels, where it comes behind: so tables are complete for whoever
  follows a product, and queries and the tree's keys for the merge that follows the paged kernel and reads them early.  Behind
  it also comes in MLA's store and merge, in top-k and in last positions.  First keys let nobody start early: attention reads
  them before its wait, and may come next.
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
