"""Launches that compile their kernels for a Hopper GPU and go no further, on a machine that needs none.

Triton's interpreter runs code that its compiler refuses, such as one name for two shapes.  Use this in a process of its own: in
it Triton believes that there is a GPU.
"""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 232448  # bytes that one block may take on compute capability 9.0


class NoGpu:
    """What Triton asks of a GPU before it launches anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(names: set[str]) -> None:
    """Makes every launch a compilation; the kernel's name is added to `names`."""

    def of_grid(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            assert compiled.metadata.shared <= SHARED_MEMORY, (kernel.__name__, compiled.metadata.shared)
            names.add(kernel.__name__)

        return launch

    driver.set_active(NoGpu())
    JITFunction.__getitem__ = of_grid  # type: ignore[method-assign]
