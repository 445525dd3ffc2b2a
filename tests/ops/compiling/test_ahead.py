"""Kernels compiled for GPUs that this machine lacks, with the arguments that real launchers give them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
from toolkit.paths import ROOT, compiler_s_output

OF_HOPPER_ALONE = {"NVIDIA H100", "NVIDIA H200"}


LITTLE = "RTX 5090"  # a GPU of little shared memory, which any of these tests needs
TURNS = ("A100", "A10", "L40S", "B200")  # of which each kernel gets one: toolkit/ahead/compile.py compiles all for all


@pytest.fixture(scope="module")
def lines(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What one process prints that compiles for all tests of this file that run: each GPU's launches are recorded once.

    Where slow tests run, each kernel is compiled for all types on this GPU, and for one set of types on two others.
    """
    run = {item.nodeid.partition("::")[2] for item in request.session.items if item.path == request.path}
    others = ("H200", *TURNS) if "test_every_kernel_compiles_and_fits_elsewhere" in run else ()
    once = others if "test_kernels_compile_and_fit_for_all_types_that_they_read" in run else (LITTLE, *others)
    rest = ("--turns", *TURNS) if others else ("--names", "H200")
    gpus = (LITTLE, *(others or ("H200",)))
    printed = compiler_s_output(
        "ahead/compile.py", "--largest", "1", "--gpus", *gpus, *(("--once", *once) if once else ()), *rest
    )
    return [json.loads(line) for line in printed.splitlines()]


def kernels_of_the_product() -> dict[str, str]:
    """The file of each kernel, by its name: a launched function is called so, and no helper is."""
    found = {}
    for room in ("specdec", "attention", "draft", "verify"):
        for path in (ROOT / room).rglob("*_*.py"):
            if path.stem.endswith(("_triton", "_hopper")):
                found.update(dict.fromkeys(re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE), path.stem))
    return found


def test_every_kernel_is_launched_for_the_gpus_that_it_is_for(lines: list[dict[str, Any]]) -> None:
    """Keeps out: a kernel that no pass of toolkit/ahead/passes.py launches, so that nobody compiles it ahead of time."""
    gpus = defaultdict[str, set[str]](set)
    for line in lines:
        gpus[line["kernel"]].add(line["gpu"])
    files = kernels_of_the_product()
    assert len(files) > 70 and set(gpus) == set(files)
    assert {name for name in files if files[name].endswith("_hopper") and not gpus[name] <= OF_HOPPER_ALONE} == set()


def check(lines: list[dict[str, Any]], gpu: str, least: int) -> None:
    compiled = [line for line in lines if line["gpu"].removeprefix("NVIDIA ") == gpu]
    assert len(compiled) > least
    assert [line for line in compiled if line["problem"]] == []


def test_every_kernel_compiles_for_a_gpu_of_little_shared_memory(lines: list[dict[str, Any]]) -> None:
    """Keeps out: what only the interpreter or one GPU's compiler takes, and tiles that other GPUs have no room for."""
    check(lines, LITTLE, 50)


@pytest.mark.slow_cases(keep=0)
def test_kernels_compile_and_fit_for_all_types_that_they_read(lines: list[dict[str, Any]]) -> None:
    """Keeps out: the same, where caches and weights have other types."""
    check(lines, LITTLE, 100)


@pytest.mark.slow_cases(keep=0)
def test_every_kernel_compiles_and_fits_elsewhere(lines: list[dict[str, Any]]) -> None:
    """Keeps out: the same, where another generation compiles otherwise, or other tiles are chosen."""
    check(lines, "H200", 70)
    for gpu in TURNS:
        check(lines, gpu, 12)
