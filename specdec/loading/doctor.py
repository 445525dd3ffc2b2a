"""What this machine is and what of specdec can run on it.  Works without a GPU, without triton and without any model.

Prints nothing that is not asked of the machine itself; `bench` takes its facts from here too.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import Counter
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec import __version__, shipped
from specdec.attention.capabilities import BACKENDS, TABLE, choose_backend, problem_of
from specdec.attention.capability_table import table_as_markdown
from specdec.attention.needs import AttentionNeeds, architecture_of
from specdec.draft.formats.detect import FORMATS
from specdec.draft.kinds import NAMES
from specdec.loading.resolve import resolve_device, resolve_dtype
from specdec.loading.threads import allowed_threads
from specdec.models.checkpoints.loader import read_target_config
from specdec.models.schemes.config import METHODS, OF_FAMILIES, ROUNDED
from specdec.ops.launch import has_pdl
from specdec.ops.products.gpus import match_of
from specdec.ops.tuned.here import look
from specdec.options import EngineOptions, setting_of, usable_cpus
from specdec.parallel import nccl

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "rich", "matplotlib",
    "flash-attn", "flash-attn-3", "flash-attn-4", "llguidance", "fastapi", "uvicorn", "prometheus-client", "ray",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Python, specdec itself, CUDA as torch was built for it, and the packages that matter and are installed."""
    found = {"python": platform.python_version(), "specdec": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # says which build it is, which the package's version may not
    if torch.version.cuda:
        found["cuda (of torch)"] = torch.version.cuda
    return found


def machine_facts(device: torch.device | None = None) -> dict[str, Any]:
    """CPU, memory and GPUs; with a device, `runs_on` names it."""
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpus_usable": usable_cpus(),
        "torch_threads": allowed_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "memory_bytes": _memory_bytes(),
        "gpus": gpus,
        "driver": _driver(),
    }
    if device is not None:
        on_gpu = device.type == "cuda"
        facts["runs_on"] = gpus[device.index or 0]["name"] if on_gpu else f"{facts['cpu']} ({_threads(facts)})"
    return facts


def run_doctor(console: Console) -> None:
    """Prints everything."""
    facts = machine_facts()
    rows = [
        ("system", facts["system"]),
        ("CPU", f"{facts['cpu']}, {facts['cpus_usable']} usable, torch uses {_threads(facts)}"),
        ("memory", f"{facts['memory_bytes'] / 2**30:.1f} GiB" if facts["memory_bytes"] else "unknown"),
        *((f"GPU {i}", _gpu_line(gpu)) for i, gpu in enumerate(facts["gpus"])),
        *([] if facts["gpus"] else [("GPU", _why_no_gpu(facts["driver"]))]),
        *((f"tiles of GPU {i}", tiles_line(torch.device("cuda", i))) for i in range(len(facts["gpus"]))),
        ("driver", facts["driver"] or "no NVIDIA driver found"),
        ("ranks", _ranks_line(len(facts["gpus"]))),
        *([("exchanges", _exchange_line(len(facts["gpus"])))] if len(facts["gpus"]) > 1 else []),
    ]
    _print_pairs(console, "Machine", rows)
    found = versions()
    absent = [name for name in PACKAGES if name not in found]
    _print_pairs(console, "Versions", [*found.items(), ("not installed", ", ".join(absent) or "nothing")])
    console.print(_backend_table())
    console.print()
    console.print(_settings_table())
    console.print()
    _print_pairs(console, "Drafters", drafter_rows())
    _print_pairs(console, "Weights of 8 and 4 bits", scheme_rows())
    pair = "complete" if shipped.is_complete() else "incomplete: bench and generate need --target and --draft"
    _print_pairs(console, "Shipped pair", [("folder", str(shipped.FOLDER)), ("state", pair)])


def tiles_line(device: torch.device) -> str:
    """Which tiles the products on that GPU take, and why."""
    if not has_pdl(device):
        return "none: cuBLAS computes products on GPUs older than compute capability 9.0"
    kind, (table, why) = match_of(device).why, look(device)
    if table is not None:
        return f"{table.about}; for other products {kind}"
    return f"{kind}; {why}" if why else f"{kind}; specdec tune measures this GPU's own"


def drafter_rows() -> list[tuple[str, str]]:
    """What can be named as a draft: each layout of heads with the kinds that are read, and each kind that has a name."""
    layouts = [(name, f"{each.kinds} in the layout of {each.title}") for name, each in FORMATS.items()]
    return [*layouts, *NAMES.items()]


def scheme_rows() -> list[tuple[str, str]]:
    """The quantised checkpoints that are read, by their quant_method, and what ordinary weights can be rounded to."""
    rounded = ", ".join(f"{name} ({form.describe()})" for name, form in ROUNDED.items())
    options = "quantize (the target's) and draft_quantize (the draft head's)"
    at_load = ("rounded at load", f"{options}: ordinary weights are rounded at load: {rounded}")
    return [*METHODS.items(), *OF_FAMILIES.items(), at_load]


def _settings_table() -> Table:
    """Every engine setting: its default, or what "auto" takes on this machine, and what it means."""
    table = Table(title="Engine settings", title_justify="left", title_style="bold", box=None, padding=(0, 2))
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("default here", overflow="fold", ratio=2)
    table.add_column("meaning", overflow="fold", ratio=3)
    taken = _taken_here()
    for item in fields(EngineOptions):
        default = ("on" if item.default else "off") if isinstance(item.default, bool) else str(item.default)
        found = taken.get(item.name)
        table.add_row(item.name, Text(f"{default}: {found}" if found else default), Text(setting_of(item).meaning))
    return table


def _taken_here() -> dict[str, str]:
    """What the defaults of options come to on this machine, where the machine decides."""
    device = resolve_device("auto")
    if (shipped.FOLDER / "target" / "config.json").is_file():
        dtype = resolve_dtype("auto", read_target_config(shipped.target_folder()), device)
    else:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    choice = choose_backend("auto", AttentionNeeds(device, dtype, architecture_of(device)))
    on_gpu, most = device.type == "cuda", allowed_threads()
    return {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch.") + (", as the checkpoint" if on_gpu else ""),
        "attention": f"{choice.name} ({choice.reason})",
        "cuda_graphs": "" if on_gpu else "off, they need a GPU",
        "max_seq_len": "the model's own limit",
        "threads": "torch's are left alone" if on_gpu else f"1 to {most}, by the model" if most > 1 else "1",
    }


def _backend_table() -> Table:
    device = resolve_device("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    table = Table(title=f"Attention backends on {device}", title_justify="left", title_style="bold", box=None, padding=(0, 2))
    for column in ("name", "runs", "tests passed on", "why not"):
        table.add_column(column, overflow="fold", justify="left")
    for name in BACKENDS:
        row = TABLE[name]
        page_size = row.page_sizes[0] if row.page_sizes else row.page_multiple
        problem = problem_of(
            name, AttentionNeeds(device, dtype, architecture_of(device), mla=not row.heads, page_size=page_size)
        )
        table.add_row(name, Text("no", "yellow") if problem else Text("yes", "green"), row.run_on, problem)
    return table


def print_capabilities() -> None:
    """What each attention backend can do on any machine, as docs/SETTINGS.md has it."""
    print(table_as_markdown())


def _print_pairs(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(table)
    console.print()


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def _gpu_line(gpu: dict[str, Any]) -> str:
    memory = gpu["memory_bytes"] / 2**30
    return f"{gpu['name']}, capability {gpu['capability']}, {memory:.1f} GiB, {gpu['multiprocessors']} multiprocessors"


def _exchange_line(gpus: int) -> str:
    """How ranks on this machine's GPUs exchange, and how long that takes."""
    from specdec.parallel.symmetric.measure import measure

    try:
        return str(measure(gpus))
    except RuntimeError as error:
        return f"they can't: {error}"


def _why_no_gpu(driver: str | None) -> str:
    if not driver:
        return "none"
    if torch.version.cuda is None:
        return f"a driver is there, but this torch ({torch.__version__}) is built without CUDA"
    return f"a driver is there, but torch (CUDA {torch.version.cuda}) sees no GPU"


def _ranks_line(gpus: int) -> str:
    """How many ranks can hold a model together here (tensor_parallel_size), and how they exchange what they compute."""
    if not gpus:
        return "tensor_parallel_size on CPUs: processes of this machine, over gloo"
    if gpus == 1:
        return "tensor_parallel_size 1: there is one GPU"
    try:
        through = f"NCCL {nccl.version()}"
    except RuntimeError as error:
        return f"tensor_parallel_size 1: {error}"
    return f"tensor_parallel_size up to {gpus}, {through}; links: {_links() or 'nvidia-smi does not say'}"


def _links() -> str:
    """What joins each pair of GPUs, in the words of nvidia-smi: NV18 is 18 lines of NVLink, SYS the way over the CPUs."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).split() for line in _nvidia_smi("topo", "-m")]
    rows = [line for line in lines if line and re.fullmatch(r"GPU\d+", line[0]) and "X" in line]
    pairs = Counter(kind for number, row in enumerate(rows) for kind in row[number + 2 : len(rows) + 1])
    return ", ".join(f"{kind} ({count} {'pair' if count == 1 else 'pairs'})" for kind, count in pairs.items())


def _driver() -> str | None:
    """The driver's version, from nvidia-smi: torch doesn't tell it."""
    return next((line.strip() for line in _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")), None)


def _nvidia_smi(*arguments: str) -> list[str]:
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


def steal_and_total() -> tuple[int, int]:
    """CPU time since the start that the hypervisor gave to others, and all of it; zeros where the system doesn't say."""
    stat = Path("/proc/stat")
    times = [int(number) for number in stat.read_text().splitlines()[0].split()[1:9]] if stat.is_file() else [0] * 8
    return times[7], sum(times)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _threads(facts: dict[str, Any]) -> str:
    count = facts["torch_threads"]
    return "1 thread" if count == 1 else f"{count} threads"
