"""Whether torch's grouped product (`F.grouped_mm`) runs on given weights and reads nothing on the host.

Shapes: E experts, O out, I in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of which the rows of inputs, weights and outputs must hold whole numbers


def has_grouped_product(weights_EOI: Sequence[Tensor]) -> bool:
    """Whether the products with all of these weights can be grouped: by shapes, dtypes and the device alone.

    On a GPU: bf16 on Hopper and later, where torch takes the groups' sizes from the device.  A CPU's own memory may be read at
    any time.  Both dims of a weight must be whole multiples of 16 bytes: they are its rows, and those of inputs and outputs.
    """
    return all(_is_known(weight.device, weight.dtype) and _is_aligned(weight) for weight in weights_EOI)


def _is_aligned(weight_EOI: Tensor) -> bool:
    return all(size * weight_EOI.element_size() % ALIGNMENT == 0 for size in weight_EOI.shape[1:])


@cache
def _is_known(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cpu":
        return dtype in (torch.float32, torch.float16, torch.bfloat16)
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)
