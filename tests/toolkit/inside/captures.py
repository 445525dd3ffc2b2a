"""Captures of CUDA graphs in tests, which earlier tests of a process can't spoil; and what no capture takes, on a CPU."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

READS = set("item tolist __bool__ __int__ __float__ __index__ nonzero cpu numpy unique masked_select equal bincount".split())
COPIES = set("tensor as_tensor new_tensor from_numpy".split())


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """As torch.cuda.graph, without Python's garbage collector: a decoder of an earlier test whose graphs it freed now would
    end the capture.
    """
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        gc.enable()


class HostUses(TorchFunctionMode):
    """Notes calls that read a tensor's values, or make one of the host's."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS | COPIES or (name in ("__getitem__", "__setitem__") and uses_host(*given)):
            frame = next(each for each in traceback.extract_stack()[-2::-1] if "/torch/" not in each.filename)
            if "attention/eager/" not in frame.filename:
                self.found.add(f"{frame.filename}:{frame.lineno} {name}")
        return function(*given, **(named or {}))


def uses_host(x: Tensor, index: Any, value: Any = None) -> bool:
    """Whether torch copies a list of places or a single value from the host, or counts the places of a mask."""
    places = index if isinstance(index, tuple) else (index,)
    if any(isinstance(at, list | range) or (isinstance(at, Tensor) and at.dtype == torch.bool) for at in places):
        return True
    is_one = len(places) == x.dim() and all(isinstance(at, int) for at in places)
    return is_one and value is not None and not isinstance(value, Tensor)
