"""What `specdec doctor` prints by default: the verdict, the one thing to do next, and two tables, on a screen of 80 x 40.

Gathers the facts that `verdict.py` judges.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from specdec import shipped
from specdec.attention.capabilities import BackendChoice, choose_backend
from specdec.attention.needs import AttentionNeeds, architecture_of, installed
from specdec.loading.about.machine import machine_facts, threads_of, versions
from specdec.loading.about.pairs import pairs
from specdec.loading.about.verdict import Gpu, Machine, Verdict, optional_rows, verdict
from specdec.loading.resolve import resolve_device
from specdec.ops.launch import has_pdl
from specdec.ops.products.gpus import match_of
from specdec.ops.products.tuned.here import look

MORE = "more: specdec doctor --details (versions, settings, drafters, formats of weights), --table (what each backend can do)"


def print_screen(make_console: Callable[[], Console]) -> None:
    """make_console: called once all facts are known."""
    facts = machine_facts()
    print_machine(facts, machine_of(facts, versions(), attention_here(), _has_tiles), make_console())


def print_machine(facts: dict[str, Any], machine: Machine, console: Console) -> None:
    print_verdict(verdict(machine), console)
    console.print(pairs("Here", here_rows(facts, machine)), "")
    console.print(pairs("What for", optional_rows(machine)), "")
    console.print(Text(MORE, "dim"))


def print_verdict(found: Verdict, console: Console) -> None:
    console.print(Text(found.runs, "bold green" if found.is_whole else "bold yellow"))
    console.print(Text(f"Next: {found.next}"))
    console.print()


def machine_of(
    facts: dict[str, Any], found: dict[str, str], choice: BackendChoice, has_tiles: Callable[[int], bool]
) -> Machine:
    """What the verdict goes by, of what the machine says.  has_tiles: whether tiles were measured on the GPU of that number."""
    packages = dict(found)
    if "triton" not in packages and (version := installed("triton")):
        packages["triton"] = version
    return Machine(
        gpus=tuple(_gpu(gpu, has_tiles(i)) for i, gpu in enumerate(facts["gpus"])),
        driver=facts["driver"],
        torch_cuda=torch.version.cuda,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        packages=packages,
        attention=choice.name,
        why=choice.reason,
        has_pair=shipped.is_complete(),
    )


def attention_here() -> BackendChoice:
    """The backend that "auto" takes on this machine for ordinary heads."""
    device = resolve_device("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return choose_backend("auto", AttentionNeeds(device, dtype, architecture_of(device)))


def _has_tiles(index: int) -> bool:
    device = torch.device("cuda", index)
    return not has_pdl(device) or match_of(device).is_own or look(device)[0] is not None


def _gpu(gpu: dict[str, Any], has_tiles: bool) -> Gpu:
    major, _, minor = gpu["capability"].partition(".")
    return Gpu(gpu["name"], (int(major), int(minor)), gpu["memory_bytes"], has_tiles)


def here_rows(facts: dict[str, Any], m: Machine) -> list[tuple[str, str]]:
    """What is there, in a few lines."""
    memory = f", {facts['memory_bytes'] / 1e9:.0f} GB" if facts["memory_bytes"] else ""
    alike = [f"{m.gpus.count(gpu)} x {gpu}" if m.gpus.count(gpu) > 1 else str(gpu) for gpu in dict.fromkeys(m.gpus)]
    unseen = "none that torch sees" if m.driver else "none"
    cuda = f", for CUDA {m.torch_cuda}" if m.torch_cuda else ", for CPUs"
    return [
        ("CPU", f"{facts['cpu']}, {facts['cpus_usable']} usable ({threads_of(facts)} of torch){memory}"),
        ("GPU", "; ".join(alike) or unseen),
        ("driver", m.driver or "no NVIDIA driver"),
        ("torch", f"{m.packages['torch']}{cuda}"),
        ("triton", m.packages.get("triton", "not installed")),
        ("transformers", m.packages["transformers"]),
        ("attention", f"{m.attention}: {m.why}"),
        ("shipped pair", "complete" if m.has_pair else f"incomplete, in {shipped.FOLDER}"),
    ]
