"""What this machine is: CPU, memory, GPUs, driver, and the versions of packages.  Works without a GPU and without triton.

Asks the machine, and judges nothing; `bench` and `verify` write these facts beside what they measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import __version__
from specdec.options import usable_cpus

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "rich", "matplotlib",
    "flash-attn", "flash-attn-3", "flash-attn-4", "llguidance", "fastapi", "uvicorn", "prometheus-client", "ray",
)  # fmt: skip


def versions(version: Callable[[str], str] = version) -> dict[str, str]:
    """Python, specdec itself, CUDA as torch was built for it, and the packages that matter and are installed."""
    import torch

    found = {"python": platform.python_version(), "specdec": __version__, **package_versions(version)}
    found["torch"] = torch.__version__  # says which build it is, which the package's version may not
    if torch.version.cuda:
        found["cuda (of torch)"] = torch.version.cuda
    return found


def package_versions(version: Callable[[str], str] = version) -> dict[str, str]:
    """Of PACKAGES, those that are installed, by their metadata, which `version` reads: nothing is imported."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine_facts(device: torch.device | None = None, threads: int | None = None) -> dict[str, Any]:
    """CPU, memory and GPUs; with a device, `runs_on` names it.  threads: of what runs on the CPU; None: as many as may."""
    import torch

    from specdec.loading.threads import allowed_threads

    gpus = [_gpu(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpus_usable": usable_cpus(),
        "torch_threads": threads or allowed_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "memory_bytes": _memory_bytes(),
        "gpus": gpus,
        "driver": _driver(),
    }
    if device is not None:
        on_gpu = device.type == "cuda"
        facts["runs_on"] = gpus[device.index or 0]["name"] if on_gpu else f"{facts['cpu']} ({threads_of(facts)})"
    return facts


def steal_and_total() -> tuple[int, int]:
    """CPU time since the start that the hypervisor gave to others, and all of it; zeros where the system doesn't say."""
    stat = Path("/proc/stat")
    times = [int(number) for number in stat.read_text().splitlines()[0].split()[1:9]] if stat.is_file() else [0] * 8
    return times[7], sum(times)


def _gpu(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def _driver() -> str | None:
    """The driver's version, from nvidia-smi: torch doesn't tell it."""
    return next((line.strip() for line in nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")), None)


def nvidia_smi(*arguments: str) -> list[str]:
    """Lines that it prints; none where it is not there or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def threads_of(facts: dict[str, Any]) -> str:
    count = facts["torch_threads"]
    return "1 thread" if count == 1 else f"{count} threads"
