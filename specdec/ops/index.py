"""Index tensors: constants that are made once, and the condition under which kernels over integers run.

This module knows no table and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps

import torch
from torch import Tensor

from specdec.ops.compiling.rehearsal import is_rehearsed
from specdec.ops.launch import has_triton
from specdec.ops.operator import is_traced


def use_index_kernels(x: Tensor) -> bool:
    """The counterpart of `use_kernels` for functions of integers, which have no gradient and fixed dtypes."""
    return x.is_cuda and not is_traced(x) and has_triton()


def kept(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator that caches the result of a function that depends on its (hashable) arguments alone.

    Nobody may write to the result.  It is kept as long as the process runs, since captured graphs read it.  A result made
    during a capture is not kept: it belongs to that graph, and its memory holds no values before the first replay.  Nor is
    one that a trace of torch.compile or torch.export makes: it has no memory at all.
    """
    made: dict[tuple[Hashable, ...], Tensor] = {}

    @wraps(make)
    def get(*args: Hashable) -> Tensor:
        if torch.compiler.is_compiling() or is_rehearsed():
            return make(*args)
        if args not in made:
            result = make(*args)
            if result.is_cuda and torch.cuda.is_current_stream_capturing():
                return result
            made[args] = result
        return made[args]

    return get


@kept
def arange(count: int, device: torch.device, step: int = 1) -> Tensor:
    """[count] int64: 0, step, 2 * step ...

    device: an existing tensor's device.
    """
    return torch.arange(0, count * step, step, dtype=torch.int64, device=device)


@kept
def predecessors(count: int, device: torch.device) -> Tensor:
    """[count] int64: 0, 0, 1, 2 ...: the index before each index; the first is its own predecessor."""
    return torch.arange(-1, count - 1, dtype=torch.int64, device=device).clamp_(min=0)
