"""CUDA graphs: capture a function once, then replay it.

A captured function reads and writes static tensors.  Its code is the same for eager calls, capture and replay; a replay refills
the tensors that the captured call returned.  This module knows no model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

R = TypeVar("R")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current device: streams, graphs and Triton launches go to it, whatever device the caller had made
    current.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class GraphSet:
    """Captured functions by key (phase, batch bucket, ...), which share one memory pool.  If disabled, it just calls the
    functions.

    Graphs that share a pool overwrite each other's intermediate memory.  Within a round they must replay in the order in which
    they were captured, and a round's phases do.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(
        self,
        key: Hashable,
        fn: Callable[[], R],
        mutable: list[Tensor],
        warm_ups: int = 2,
        before: Callable[[], object] = lambda: None,
    ) -> R:
        """Calls fn(), or replays its capture.

        mutable: the tensors that fn changes and whose values matter afterwards.  Capture runs fn first to warm up, and restores
            these tensors after each run.  Scratch that fn overwrites on every call need not be listed.
        warm_ups: 0 if fn ran eagerly at the same shapes before.
        before: called after each run that warms up; it makes anew what fn reads and changes, and what is too large to copy.
        """
        if not self.enabled:
            return fn()
        if key not in self._graphs:
            self._graphs[key] = self._capture(fn, mutable, warm_ups, before)
        graph, outputs = self._graphs[key]
        graph.replay()
        return cast(R, outputs)

    def _capture(
        self, fn: Callable[[], Any], mutable: list[Tensor], warm_ups: int, before: Callable[[], object]
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        saved = [tensor.clone() for tensor in mutable]
        stream = _warm_up_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):  # kernels compile and libraries allocate, which capture forbids
                fn()
                for tensor, value in zip(mutable, saved, strict=True):
                    tensor.copy_(value)
                before()
        torch.cuda.current_stream().wait_stream(stream)
        # If the capture fails, the next one takes a new pool: torch refuses to capture into this one again.
        pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), None
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads ask of the GPU meanwhile, memory for example, would otherwise end the capture.
        with _no_garbage_collection(), _undone_if_failed(pool):
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = fn()  # recorded, not executed: no tensor changes here
        self._pool = pool
        return graph, outputs


@cache
def _warm_up_stream(device: int) -> torch.cuda.Stream:
    """One stream of a GPU for all warm-ups: cuBLAS keeps a workspace of 32 MiB for every stream that it has worked on."""
    return torch.cuda.Stream(device)


@contextmanager
def _undone_if_failed(pool: Any) -> Iterator[None]:
    """Ends for the process what torch 2.11 leaves as if a failed capture went on, but for the pool of pinned memory, for which
    torch has no function in Python.

    Of its random numbers on the GPU every later draw would raise, and of its memory nothing would be given back any more.  What
    this thread did next would be queued in the capture's stream.
    """
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    generator = torch.cuda.default_generators[device]
    before = generator.clone_state()
    try:
        yield
    except BaseException:  # of any kind, an interrupt too: it is raised again below
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(before)
        with suppress(RuntimeError):  # no capture uses the pool: it ended as it should, and its graph gives the pool back
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switches Python's garbage collector off: if it freed an older decoder's graphs or pinned memory now, the capture would
    fail.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
