"""CUDA graphs: capture a function once, replay it.  Knows no model: the function reads and writes static tensors.

The function's one path serves eager, capture and replay; what it returns after a replay are the same tensors, refilled.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: streams, graphs and Triton launches go there, whatever the caller's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class GraphSet:
    """Captured functions by key (phase, batch bucket, ...), sharing one memory pool.  Disabled, it just calls them.

    Graphs that share a pool must replay in the order they were captured within a round, which phases do.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, fn: Callable[[], Any], mutable: list[Tensor]) -> Any:
        """Calls fn(), or replays its capture.

        mutable: tensors that fn changes and whose value matters; the warm-up runs before a capture leave them as they
        were.  Scratch that fn overwrites on every call need not be listed.
        """
        if not self.enabled:
            return fn()
        if key not in self._graphs:
            self._graphs[key] = self._capture(fn, mutable)
        graph, outputs = self._graphs[key]
        graph.replay()
        return outputs

    def _capture(self, fn: Callable[[], Any], mutable: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Any]:
        saved = [tensor.clone() for tensor in mutable]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and lets libraries allocate; capture allows neither
                fn()
                for tensor, value in zip(mutable, saved, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.graph(graph, pool=self._pool):
            outputs = fn()  # recorded, not run: nothing has changed yet
        return graph, outputs


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Inside, no cycle is collected: freeing an older decoder's graphs or pinned memory would break the capture under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
