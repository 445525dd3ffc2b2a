"""A GPU that does not exist: tensors on it have shapes and no memory, and launches are written down instead of done.

Everything above a launch is the real thing: dispatches, launchers and tiles see a GPU of the asked kind.  What Triton would
compile is known from the arguments alone: their types, which numbers are multiples of 16 and where a tensor begins.  This
module knows no kernel.  Use it in a process of its own, without TRITON_INTERPRET: nothing of it can be undone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton import compile as compile_source
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specdec.ops import operator

ADDRESS = 1 << 20  # where every tensor's memory would begin
NOTHING = FakeTensorMode()  # one for all tensors: some are kept from pass to pass


class AheadGpu(NamedTuple):
    """shared_bytes: what one program may take.  bandwidth: in bytes per second."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    bandwidth: float

    @property
    def arch(self) -> int:
        """80 for compute capability 8.0."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def index(self) -> int:
        """Of its device: the machine has one of each kind."""
        return list(GPUS.values()).index(self)

    @property
    def properties(self) -> Any:
        return SimpleNamespace(
            name=self.name, major=self.capability[0], minor=self.capability[1], multi_processor_count=self.multiprocessors,
            shared_memory_per_block_optin=self.shared_bytes, memory_clock_rate=self.bandwidth / 2e3, memory_bus_width=8,
        )  # fmt: skip


GPUS = {
    name: AheadGpu(f"NVIDIA {name}", *facts)
    for name, facts in {
        "A100": ((8, 0), 108, 166912, 2.0e12),
        "A10": ((8, 6), 72, 101376, 0.6e12),
        "L40S": ((8, 9), 142, 101376, 0.86e12),
        "H100": ((9, 0), 132, 232448, 3.35e12),
        "H200": ((9, 0), 132, 232448, 4.92e12),
        "B200": ((10, 0), 148, 232448, 8.0e12),
        "RTX 5090": ((12, 0), 170, 101376, 1.8e12),
    }.items()
}


@dataclass(frozen=True)
class KernelLaunch:
    """What Triton compiles for one launch.  key: equal for launches that need the same compiled kernel."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    key: Hashable

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compiled(self, gpu: AheadGpu) -> Any:
        source = ASTSource if not self.kernel.is_gluon() else self.kernel.ASTSource
        return compile_source(
            source(self.kernel, self.signature, self.constants, self.attributes), target=target_of(gpu), options=self.options
        )


class _Pointer:
    """A tensor as Triton asks it."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._at = tensor.dtype, tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._at


class NoDriver:
    """What Triton asks of a driver before it launches anything."""

    def __init__(self, gpu: AheadGpu) -> None:
        self.gpu = gpu

    def get_current_target(self) -> GPUTarget:
        return target_of(self.gpu)

    def get_current_device(self) -> int:
        return self.gpu.index

    def get_current_stream(self, device: int) -> int:
        return 0


def target_of(gpu: AheadGpu) -> GPUTarget:
    return GPUTarget("cuda", gpu.arch, 32)


def record(gpu: AheadGpu, run: Callable[[], object]) -> list[KernelLaunch]:
    """What run() launches on that GPU, each compiled kernel once."""
    launches: dict[Hashable, KernelLaunch] = {}

    def note(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        options = {"debug": False, "instrumentation_mode": "", **options}
        *_, backend, bind = self.device_caches[gpu.index]
        bound, specialised, given = bind(*map(_as_asked, args), **options)
        parsed, signature, constants, attributes = self._pack_args(backend, options, bound, specialised, given)
        key = self.__module__, self.__name__, str(specialised), str(given)
        launches.setdefault(key, KernelLaunch(self, signature, constants, attributes, dict(parsed.__dict__), key))

    _pretend(gpu)
    JITFunction.run = note
    with NOTHING, torch.device("cuda", gpu.index), torch.inference_mode():
        run()
    return list(launches.values())


def _as_asked(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Pointer(value)
    if hasattr(value, "block_shape"):  # a TMA descriptor of tiles
        value.base = _Pointer(value.base)
    return value


def _part_of(x: Tensor, index: Any) -> Tensor:
    """x[index]."""
    items = list(index) if isinstance(index, tuple) else [index]
    if ... in items:
        at = items.index(...)
        items[at : at + 1] = [slice(None)] * (x.dim() - sum(item is not None for item in items) + 1)
    dim, tensors = 0, []
    for item in items:
        if item is None:
            x = x.unsqueeze(dim)
        elif isinstance(item, int):
            x = x.select(dim, item)
            continue
        elif isinstance(item, slice):
            first, end, step = item.indices(x.shape[dim])
            x = torch.ops.aten.slice(x, dim, first, max(first, end), step)
        else:
            tensors += [None] * (dim - len(tensors)) + [item]
        dim += 1
    return torch.ops.aten.index(x, tensors) if tensors else x


def _pretend(gpu: AheadGpu) -> None:
    """Makes the GPU the current one of a machine that has all of GPUS."""
    loose, fake, all_gpus = torch.cuda, FakeTensor, list(GPUS.values())  # type: Any, Any, list[AheadGpu]

    def asked(device: Any = None) -> AheadGpu:
        index = device if isinstance(device, int | None) else torch.device(device).index
        return gpu if index is None else all_gpus[index]

    loose.get_device_capability, loose.get_device_name = lambda _=None: asked(_).capability, lambda _=None: asked(_).name
    loose.get_device_properties, loose.current_device = lambda _=None: asked(_).properties, lambda: gpu.index
    loose.is_current_stream_capturing = lambda: False
    fake.data_ptr = lambda self: ADDRESS + self.storage_offset() * self.element_size()
    fake.__getitem__ = _part_of  # torch's own asks for a CUDA that a build for CPUs lacks
    if FakeTensor not in operator._PLAIN:  # no trace records what these tensors go through
        operator._PLAIN = (*operator._PLAIN, FakeTensor)
    driver.set_active(NoDriver(gpu))


def code_hash(ptx: str) -> str:
    """Of the instructions: where in the source they come from does not count."""
    lines = (re.sub(r"\s*//.*$", "", line).strip() for line in ptx.split(".section")[0].splitlines())
    kept = [line for line in lines if line and not re.match(r"\.(loc|file)\b|\$L__(tmp|func_)|\.version", line)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
