"""Rehearses a pass: its kernels are compiled side by side before the pass runs, and nothing is computed.

Triton compiles a kernel where it is first launched, and the host waits there, for one kernel after the other.  While a pass is
rehearsed, launches hand their kernels to a pool of threads and return, and torch's operations change no tensor.  So a pass can
be rehearsed on memory that holds anything, and leaves no trace.  The function must not depend on values of the device: what a
CUDA graph may hold can be rehearsed, too.

A compilation that fails here, or that nobody began, is forgotten, and so is a rehearsal: the launch itself then compiles, and
gives the error.  When the program ends, compilations that have begun are finished, and the others are dropped.

This module knows no kernel and no model.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from specdec.ops.compiling.known import KnownKernels
from specdec.ops.compiling.launchers import separate_launchers
from specdec.ops.launch import has_triton

MAX_THREADS = 16  # more would wait for each other, since a part of each compilation is Python
ALIGNMENT = 16  # bytes; Triton compiles another kernel for memory that does not begin at a multiple of them
_threads = threading.local()
_one_at_a_time = threading.Lock()  # rehearsals exchange a method of Triton's class


def compiles_ahead() -> bool:
    """Whether this version of Triton compiles in other threads."""
    if not has_triton():
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode")


def is_rehearsed() -> bool:
    """Whether this thread rehearses, so that tensors hold no values."""
    return getattr(_threads, "rehearses", False)


class Rehearsals:
    """Compiles the kernels of passes on one GPU: `rehearse` them all, then `begin`, then wait for each before it runs.

    Compilations wait for `begin`, because a rehearsal beside them would take seconds: both need Python's one lock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._most = device, min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()  # held to read or change the number of threads, and to take of what waits
        self._running = 0
        self._compilers = _compilers(self)

    def rehearse(self, run: Callable[[], object]) -> Callable[[], None]:
        """Calls run() as a rehearsal.  Returns a function that waits until the kernels seen so are ready to be launched.

        If run() fails, what was launched before is compiled.
        """
        needed: dict[str, Any] = {}
        self._compilers.needed = needed
        try:
            with _one_at_a_time, _no_launches(self._compilers), Nothing():
                run()
        except Exception:  # of any kind: run() fails again where it counts, if it does
            pass
        except BaseException:  # an interrupt: launches wait for what was seen
            self.begin()
            raise

        def wait() -> None:
            self.begin()  # again, with what an interrupt has kept from beginning
            for future in needed.values():
                future.result(ignore_errors=True)

        return wait

    def recall(self, known: KnownKernels) -> None:
        """Loads kernels that earlier starts have compiled, so that rehearsals find them."""
        loading = []
        for load in known.loads():
            loading.append(self.submit(load))
            self.begin()
        for future in loading:
            with suppress(CancelledError):  # by `close`
                future.result()

    @property
    def functions(self) -> set[Any]:
        """The sources of all kernels that were compiled so far because a rehearsal launched them."""
        compiled = (future.kernel for future in self._compilers.future_kernels.values())
        return {kernel.src.fn for kernel in compiled if kernel is not None}

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """As an executor's: the call's future.  Triton's mode asks for it."""
        future: Future[Any] = Future()
        self._waiting.append((future, function))
        return future

    def begin(self) -> None:
        """Begins with all compilations that wait, and that no thread will come to by itself."""
        with self._lock:
            new = min(self._most - self._running, len(self._waiting))
        try:
            for _ in range(new):
                threading.Thread(target=self._compile, name="specdec-compile").start()
        except RuntimeError:  # the system has no more threads: those that compile go on, and launches do the rest
            self.close()

    def close(self) -> None:
        """Drops what still waits for a thread: a launch that needs it compiles it."""
        with self._lock:
            self._drop()

    def _compile(self) -> None:
        """What a thread does: it ends when nothing waits, so that no thread is left which nobody ends."""
        with self._lock:
            self._running += 1
        while (taken := self._take()) is not None:
            _fill(*taken, self._device)

    def _take(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if not threading.main_thread().is_alive():  # Python waits for this thread before it ends
                self._drop()
            if self._waiting:
                return self._waiting.popleft()
            self._running -= 1
            return None

    def _drop(self) -> None:
        while self._waiting:
            self._waiting.popleft()[0].cancel()


def compile_ahead(run: Callable[[], object], device: torch.device) -> None:
    """Compiles what run() launches before it first needs values on the host."""
    rehearsals = Rehearsals(device)
    try:
        wait = rehearsals.rehearse(run)
        wait()
    finally:
        rehearsals.close()


def _fill(future: Future[Any], function: Callable[[], Any], device: torch.device) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        torch.cuda.set_device(device)  # of this thread
        future.set_result(function())
    except BaseException as error:  # whoever waits for the future gets it
        future.set_exception(error)


def _compilers(executor: Rehearsals) -> Any:
    """Triton's own mode of compiling in other threads, but nobody waits at its end, kernels get loaded, and launches compile
    what nothing came of, or what nobody has begun: Triton would keep the failure for them, or have them wait for ever.
    """
    from triton import AsyncCompileMode
    from triton.runtime._async_compile import FutureKernel

    separate_launchers()

    class Compiled(FutureKernel):
        kernel: Any  # None until it is compiled

        def __init__(self, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None], future: Future[Any]) -> None:
            super().__init__(finalize_fn, future)
            self.compile_fn = compile_fn

        def result(self, ignore_errors: bool = False) -> Any:
            if self.kernel is None and not ignore_errors:
                self.future.cancel()  # does nothing to a compilation that has begun
            try:
                return super().result()
            except Exception:  # of any kind: the launch has its own
                if ignore_errors:
                    return None
            kernel = self.compile_fn()
            self.finalize_compile(kernel)
            self.kernel = kernel
            return kernel

    class Compilers(AsyncCompileMode):
        needed: dict[str, Any]  # what the rehearsal has launched

        def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
            if key not in self.future_kernels:
                future = executor.submit(lambda: _loaded(compile_fn()))
                self.future_kernels[key] = Compiled(compile_fn, finalize_fn, future)
            self.needed[key] = self.future_kernels[key]
            return self.future_kernels[key]

    return Compilers(executor, ignore_errors=True)


def _loaded(kernel: Any) -> Any:
    """The compiled kernel on the GPU, and with its launcher, which some versions of Triton have a C compiler make."""
    _ = kernel.run
    return kernel


@contextmanager
def _no_launches(compilers: Any) -> Iterator[None]:
    """Has this thread's launches compile through `compilers` and return.  Other threads launch as ever."""
    from triton.runtime.jit import JITFunction

    launch, seen = JITFunction.run, set[Hashable]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not is_rehearsed():
            return launch(self, *args, grid=grid, warmup=warmup, **options)
        like = id(self), *map(_likeness, args), *((name, _likeness(value)) for name, value in options.items())
        if like in seen:  # in another layer: Triton would take longer to find that out
            return None
        seen.add(like)
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    _threads.rehearses = True
    try:
        with compilers:
            yield
    finally:
        _threads.rehearses = False
        JITFunction.run = launch


def _likeness(value: Any) -> Hashable:
    """What a kernel that is compiled for an argument depends on, or more than that."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT
    if hasattr(value, "block_shape"):  # a TMA descriptor of tiles
        return (
            _likeness(value.base),
            *map(tuple, (value.shape, value.strides, value.block_shape)),
            getattr(value, "layout", None),
        )
    return type(value), value if isinstance(value, Hashable) else id(value)


class Nothing(TorchDispatchMode):
    """Operations of torch read no index and change no tensor.

    An operation that changes a tensor leaves it as it is.  A product gives memory of the right shape.  Any other operation is
    done, but on zeros where it takes integers, which may be indices; so its result has the right shape, and any values.
    torch's own way of telling shapes, on the device "meta", imports its compiler, which takes longer than a rehearsal.
    RuntimeError if a pass needs values on the host.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options: dict[str, Any] = kwargs or {}
        if func.is_view or func.overloadpacket in UNREAD:
            return func(*args, **options)
        if torch.Tag.pointwise in func.tags and not func._schema.is_mutable:  # values can't harm it
            return func(*args, **options)
        if func._schema.is_mutable:
            return _written(func._schema, args, options)
        if func.overloadpacket in PRODUCTS:
            return PRODUCTS[func.overloadpacket](*args)
        is_masked = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves((args, options)))
        is_sized = torch.Tag.dynamic_output_shape not in func.tags or func.overloadpacket is _aten.index and not is_masked
        if torch.Tag.data_dependent_output in func.tags or not is_sized:
            raise RuntimeError(f"{func} needs values, and a rehearsal has none")
        return func(*tree_map_only(Tensor, _without_indices, args), **tree_map_only(Tensor, _without_indices, options))


def _written(schema: Any, args: Any, options: dict[str, Any]) -> Any:
    """What an operation returns that changes some of its arguments: these."""
    given = dict(zip((each.name for each in schema.arguments), args)) | options
    written = [given[each.name] for each in schema.arguments if each.is_write and each.name in given]
    return tuple(written) if len(schema.returns) > 1 else written[0] if schema.returns else None


def _without_indices(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else torch.zeros_like(tensor)


def _linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_NK.shape[0])


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _mm(a, b)


_aten = torch.ops.aten
UNREAD = {_aten.new_empty, _aten.empty_like}  # they read no values
PRODUCTS: dict[Any, Callable[..., Tensor]] = {_aten.linear: _linear, _aten.mm: _mm, _aten.bmm: _mm, _aten.addmm: _addmm}
