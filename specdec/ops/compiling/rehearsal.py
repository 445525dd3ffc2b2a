"""Rehearses a pass: its kernels are compiled side by side before the pass runs, and nothing is computed.

Triton compiles a kernel where it is first launched, and the host waits there, for one kernel after the other.  While a pass is
rehearsed, launches hand their kernels to a pool of threads and return, and torch's operations only say what their results look
like.  No tensor's values are read or written, so a pass can be rehearsed on memory that holds anything.  The function must not
depend on values of the device: what a CUDA graph may hold can be rehearsed, too.

A compilation that fails here is forgotten, and so is a rehearsal: the launch itself then compiles, and gives the error.

This module knows no kernel and no model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

MOST_THREADS = 16  # more would wait for each other, since a part of each compilation is Python
_aten = torch.ops.aten
HARMLESS = {_aten.cat, _aten.cumsum, _aten.isfinite, _aten.floor_divide, _aten.where}  # beside what torch calls pointwise
_threads = threading.local()
_one_at_a_time = threading.Lock()  # rehearsals exchange a method of Triton's class


def is_rehearsed() -> bool:
    """Whether this thread rehearses, so that tensors hold no values."""
    return getattr(_threads, "rehearses", False)


class Rehearsals:
    """Compiles the kernels of passes on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        count = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(count, "specdec-compile", lambda: torch.cuda.set_device(device))
        self._compilers = _compilers(self._pool)

    def rehearse(self, run: Callable[[], object]) -> Callable[[], None]:
        """Calls run() as a rehearsal.  Returns a function that waits until the kernels seen so far are ready to be launched.

        If run() fails, what was launched before is compiled.
        """
        needed: dict[str, Any] = {}
        self._compilers.needed = needed
        try:
            with _one_at_a_time, _no_launches(self._compilers), Nothing():
                run()
        except Exception:  # of any kind: run() fails again where it counts, if it does
            pass

        def wait() -> None:
            for future in needed.values():
                future.result(ignore_errors=True)

        return wait

    def close(self) -> None:
        """Drops what still waits for a thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _compilers(pool: ThreadPoolExecutor) -> Any:
    """Triton's own mode of compiling in other threads, but for two things: nobody waits at its end, and kernels get loaded."""
    from triton import AsyncCompileMode

    class Compilers(AsyncCompileMode):
        needed: dict[str, Any]  # what the rehearsal has launched

        def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
            future = super().submit(key, lambda: _loaded(compile_fn()), finalize_fn)
            self.raw_futures.clear()  # those that Triton would wait for
            self.needed[key] = future
            return future

    return Compilers(pool, ignore_errors=True)


def _loaded(kernel: Any) -> Any:
    """The compiled kernel on the GPU, and with its launcher, which some versions of Triton have a C compiler make."""
    _ = kernel.run
    return kernel


@contextmanager
def _no_launches(compilers: Any) -> Iterator[None]:
    """Has this thread's launches compile through `compilers` and return.  Other threads launch as ever."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or is_rehearsed(), **options)

    JITFunction.run = compile_only
    _threads.rehearses = True
    try:
        with compilers:
            yield
    finally:
        _threads.rehearses = False
        JITFunction.run = launch


class Nothing(TorchDispatchMode):
    """Operations of torch give empty results of the right shapes.

    An operation that changes a tensor leaves it as it is, and what needs values on the host fails.  Some operations are done
    for real, because no values could harm them: views, tensors that are made of numbers alone, and what works element by
    element, whose shapes torch would otherwise only tell after importing its compiler.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, which takes longer than a rehearsal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options: dict[str, Any] = kwargs or {}
        tensors = [each for each in tree_leaves((args, options)) if isinstance(each, Tensor)]
        if not tensors or func.is_view:
            return func(*args, **options)
        if func._schema.is_mutable:
            return _written(func._schema, args, options)
        if torch.Tag.pointwise in func.tags or func.overloadpacket in HARMLESS:
            return func(*args, **options)
        device = options.get("device") or next((each.device for each in tensors if each.is_cuda), tensors[0].device)
        if "device" in options:
            options = {**options, "device": torch.device("meta")}
        shapes = func(*tree_map_only(Tensor, _shape_of, args), **tree_map_only(Tensor, _shape_of, options))
        return tree_map_only(Tensor, lambda each: _empty(each, device), shapes)


def _written(schema: Any, args: Any, options: dict[str, Any]) -> Any:
    """What an operation returns that changes some of its arguments: these."""
    given = dict(zip((each.name for each in schema.arguments), args)) | options
    written = [given[each.name] for each in schema.arguments if each.is_write and each.name in given]
    return tuple(written) if len(schema.returns) > 1 else written[0] if schema.returns else None


def _shape_of(tensor: Tensor) -> Tensor:
    return _empty(tensor, torch.device("meta"))


def _empty(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
