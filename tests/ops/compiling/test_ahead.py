"""Kernels compiled for GPUs that this machine lacks, with the arguments that real launchers give them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
from toolkit.paths import ROOT, compiler_s_output

OF_HOPPER_ALONE = {"NVIDIA H100", "NVIDIA H200"}


def lines(*arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in compiler_s_output("ahead/compile.py", *arguments).splitlines()]


def kernels_of_the_product() -> dict[str, str]:
    """The file of each kernel, by its name: a launched function is called so, and no helper is."""
    found = {}
    for room in ("specdec", "attention", "draft", "verify"):
        for path in (ROOT / room).rglob("*_*.py"):
            if path.stem.endswith(("_triton", "_hopper")):
                found.update(dict.fromkeys(re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE), path.stem))
    return found


def test_every_kernel_is_launched_for_the_gpus_that_it_is_for() -> None:
    """Keeps out: a kernel that no pass of toolkit/ahead/passes.py launches, so that nobody compiles it ahead of time."""
    gpus = defaultdict[str, set[str]](set)
    for line in lines("--names", "--gpus", "H200", "RTX 5090"):
        gpus[line["kernel"]].add(line["gpu"])
    files = kernels_of_the_product()
    assert len(files) > 70 and set(gpus) == set(files)
    assert {name for name in files if files[name].endswith("_hopper") and not gpus[name] <= OF_HOPPER_ALONE} == set()


def check(*arguments: str) -> None:
    compiled = lines("--largest", "1", *arguments)
    assert len(compiled) > 50
    assert [line for line in compiled if line["problem"]] == []


def test_every_kernel_compiles_for_a_gpu_of_little_shared_memory() -> None:
    """Keeps out: what only the interpreter or one GPU's compiler takes, and tiles that other GPUs have no room for."""
    check("--gpus", "RTX 5090", "--once")


@pytest.mark.slow
def test_kernels_compile_and_fit_for_all_types_that_they_read() -> None:
    """Keeps out: the same, where caches and weights have other types."""
    check("--gpus", "RTX 5090")


@pytest.mark.slow
def test_every_kernel_compiles_and_fits_elsewhere() -> None:
    """Keeps out: the same, where another generation compiles otherwise, or other tiles are chosen."""
    check("--gpus", "A100", "A10", "L40S", "H100", "H200", "B200", "--once")
