"""Starts that know kernels of earlier starts, on a machine that needs no GPU.

Run this file in a process of its own: in it Triton believes that there is a GPU, and kernels are compiled but never loaded.  A
start is what a fresh process does: the tables in which Triton finds its kernels are empty.  Prints, for each start by its name,
how many kernels were known and how many of two were compiled or read by Triton.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from specdec.ops.compiling.known import KnownKernels
from specdec.ops.compiling.rehearsal import Rehearsals
from specdec.ops.products.kernels.dense import stream_hopper, stream_triton
from specdec.ops.products.tiles.dense import ProductTiles
from toolkit.ahead.machine import GPUS, NoDriver

DEVICE = torch.device("cuda", GPUS["H200"].index)
FUNCTIONS = stream_hopper.hopper_linear_kernel, stream_triton.activation_kernel


def launches() -> None:
    x_MK, weight_NK = torch.zeros(16, 256, dtype=torch.bfloat16), torch.zeros(256, 256, dtype=torch.bfloat16)
    stream_hopper.launch_hopper_linear(x_MK, weight_NK, None, True, ProductTiles("stream_hopper", 16, 64, 64, 1, 4, 2))
    stream_triton.launch_activation(weight_NK, "swiglu")


def start(purpose: str = "one") -> tuple[int, int]:
    """Kernels that were known, and those that Triton was asked for."""
    for function in FUNCTIONS:
        function.device_caches.clear()
    rehearsals, known = Rehearsals(DEVICE), KnownKernels(DEVICE, purpose)
    rehearsals.recall(known)
    number = sum(len(function.device_caches[GPUS["H200"].index][0]) for function in FUNCTIONS)
    rehearsals.rehearse(launches)()
    asked = len(rehearsals._compilers.future_kernels)
    known.add(rehearsals.functions)
    rehearsals.close()
    return number, asked


def main() -> None:
    loose: Any = torch.cuda
    loose.get_device_name, loose.get_device_capability, loose.set_device = lambda _: "H200", lambda _: (9, 0), lambda _: None
    driver.set_active(NoDriver(GPUS["H200"]))
    CompiledKernel._init_handles = lambda self: None
    for module in (stream_hopper, stream_triton):
        module.chained = lambda device: {"PDL": True, "launch_pdl": True}  # type: ignore[attr-defined]
    folder = Path(knobs.cache.dir)
    found = {"first": start(), "second": start(), "another purpose": start("two")}
    source: Any = stream_triton.activation_kernel
    source.raw_src = [*source.raw_src, "# changed\n"]
    found["another source"] = start()
    found["the same again"] = start()
    next(folder.glob("*/activation_kernel.cubin")).unlink()
    found["a file is gone"] = start()
    for file in (folder / "specdec").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    found["cut short"] = start()
    shutil.rmtree(folder / "specdec")
    (folder / "specdec").write_text("no folder")
    found["nowhere to write"] = start()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
