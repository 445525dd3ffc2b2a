"""Whether torch's grouped product (`F.grouped_mm`) runs on given weights without reading anything on the host.

Shapes: E experts, N out, K in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

Capability = Callable[[torch.device], tuple[int, int]]  # of a GPU
ALIGNMENT = 16  # bytes: the rows of inputs, weights and outputs must be multiples of it


def has_grouped_product(weights_ENK: Sequence[Tensor], capability: Capability = torch.cuda.get_device_capability) -> bool:
    """Whether the products with all of these weights can be grouped; decided by shapes, dtypes and the device alone.

    On a GPU this takes bf16 on Hopper or later, where torch reads the groups' sizes on the device.  (On a CPU, reading sizes
    costs no synchronisation.)  Both dims of a weight must be multiples of 16 bytes: they are the row lengths of weights, inputs
    and outputs.
    """
    return all(_is_known(weight.device, weight.dtype, capability) and _is_aligned(weight) for weight in weights_ENK)


def _is_aligned(weight_ENK: Tensor) -> bool:
    return all(size * weight_ENK.element_size() % ALIGNMENT == 0 for size in weight_ENK.shape[1:])


@cache
def _is_known(device: torch.device, dtype: torch.dtype, capability: Capability) -> bool:
    """Whether torch has a grouped product for this device and dtype that reads no sizes on the host of a GPU."""
    if device.type == "cpu":
        return dtype in (torch.float32, torch.float16, torch.bfloat16)
    return device.type == "cuda" and dtype == torch.bfloat16 and capability(device) >= (9, 0)
