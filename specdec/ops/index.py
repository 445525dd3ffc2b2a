"""Index tensors: constants that are made once, and when the kernels that only read and write integers run.

Knows no table and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps

import torch
from torch import Tensor

from specdec.ops.launch import has_triton


def use_index_kernels(x: Tensor) -> bool:
    """`use_kernels` for stages without a floating-point input: they have no gradient and know their integers' dtypes."""
    return x.is_cuda and has_triton()


def kept(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator of a function whose result depends on its (hashable) arguments alone: called once, launched once.

    Nobody may write to the result.  It is kept for good, since captured graphs read it; what is first made inside a
    capture belongs to that graph and holds nothing before a replay, so it is not kept.
    """
    made: dict[tuple[Hashable, ...], Tensor] = {}

    @wraps(make)
    def get(*args: Hashable) -> Tensor:
        if args not in made:
            result = make(*args)
            if result.is_cuda and torch.cuda.is_current_stream_capturing():
                return result
            made[args] = result
        return made[args]

    return get


@kept
def arange(count: int, device: torch.device, step: int = 1) -> Tensor:
    """[count] int64: 0, step, 2 * step ...  device: another tensor's."""
    return torch.arange(0, count * step, step, device=device)


@kept
def predecessors(count: int, device: torch.device) -> Tensor:
    """[count] int64: 0, 0, 1, 2 ...: who comes before each; the first is its own."""
    return torch.arange(-1, count - 1, device=device).clamp_(min=0)
