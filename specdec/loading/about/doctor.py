"""What this machine is and what of specdec can run on it.  Works without a GPU, without triton and without any model.

Prints nothing that is not asked of the machine itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec import shipped
from specdec.attention.caches.quant_cache import FP8_MIN_ARCHITECTURE
from specdec.attention.capabilities import BACKENDS, TABLE, choose_backend, problem_of
from specdec.attention.capability import Feature
from specdec.attention.needs import AttentionNeeds, architecture_of
from specdec.checks import setting_of
from specdec.draft.formats.detect import FORMATS
from specdec.draft.kinds import all_kinds, kinds_by_files
from specdec.loading.about.machine import PACKAGES, machine_facts, nvidia_smi, threads_of, versions
from specdec.loading.about.pairs import pairs
from specdec.loading.resolve import resolve_device, resolve_dtype
from specdec.loading.threads import allowed_threads
from specdec.models.registry import choose_target
from specdec.models.schemes.config import METHODS, OF_FAMILIES, ROUNDED
from specdec.ops.launch import PDL_FROM, has_gluon, has_pdl, has_triton
from specdec.ops.products.gpus import match_of
from specdec.ops.products.tuned.here import look
from specdec.options import EngineOptions
from specdec.parallel import nccl
from specdec.startup import STARTUP


def print_details(make_console: Callable[[], Console]) -> None:
    """Prints everything; `screen.py` prints what it comes to.  make_console: called once all facts are known."""
    facts = machine_facts()
    rows = [
        ("system", facts["system"]),
        ("CPU", f"{facts['cpu']}, {facts['cpus_usable']} usable, torch uses {threads_of(facts)}"),
        ("memory", f"{facts['memory_bytes'] / 2**30:.1f} GiB" if facts["memory_bytes"] else "unknown"),
        *((f"GPU {i}", _gpu_line(gpu)) for i, gpu in enumerate(facts["gpus"])),
        *([] if facts["gpus"] else [("GPU", _why_no_gpu(facts["driver"]))]),
        *((f"kernels of GPU {i}", kernels_line(torch.cuda.get_device_capability(i))) for i in range(len(facts["gpus"]))),
        *((f"tiles of GPU {i}", tiles_line(torch.device("cuda", i))) for i in range(len(facts["gpus"]))),
        ("driver", facts["driver"] or "no NVIDIA driver found"),
        ("ranks", _ranks_line(len(facts["gpus"]))),
        *([("exchanges", _exchange_line(len(facts["gpus"])))] if len(facts["gpus"]) > 1 else []),
    ]
    console = make_console()
    console.print(pairs("Machine", rows), "")
    found = versions()
    absent = [name for name in PACKAGES if name not in found]
    console.print(pairs("Versions", [*found.items(), ("not installed", ", ".join(absent) or "nothing")]), "")
    console.print(_backend_table())
    console.print()
    console.print(_settings_table())
    console.print()
    console.print(pairs("Drafters", drafter_rows()), "")
    console.print(pairs("Weights of 8 and 4 bits", scheme_rows()), "")
    pair = "complete" if shipped.is_complete() else "incomplete: bench and generate need --target and --draft"
    console.print(pairs("Shipped pair", [("folder", str(shipped.FOLDER)), ("state", pair)]), "")


def kernels_line(capability: tuple[int, int]) -> str:
    """Which of specdec's kernels a GPU of that compute capability gets, and which it does not."""
    if not has_triton():
        return "none: Triton is not installed"
    products = "products too" if capability >= PDL_FROM else "but for products, which cuBLAS computes below 9.0"
    kinds = [f"Triton's for any GPU, {products}"]
    if capability == (9, 0):
        kinds.append("Hopper's own" if has_gluon() else "none of Hopper's own, because this Triton has no Gluon")
    at_least = ".".join(map(str, FP8_MIN_ARCHITECTURE))
    kinds.append("float8" if capability >= FP8_MIN_ARCHITECTURE else f"no float8, which takes {at_least}")
    return "; ".join(kinds)


def tiles_line(device: torch.device) -> str:
    """Which tiles the products on that GPU take, and why."""
    if not has_pdl(device):
        return "none: cuBLAS computes products on GPUs older than compute capability 9.0"
    kind, (table, why) = match_of(device).why, look(device)
    if table is not None:
        return f"{table.about}; for other products {kind}"
    return f"{kind}; {why}" if why else f"{kind}; specdec tune measures this GPU's own"


def drafter_rows() -> list[tuple[str, str]]:
    """What can be named as a draft: each layout of heads with the kinds that are read, each kind that other files are of, and
    each that has a name.
    """
    layouts = [(name, f"{each.kinds} in the layout of {each.title}") for name, each in FORMATS.items()]
    told = [(kind.name, kind.meaning) for kind in kinds_by_files()]
    return [*layouts, *told, *((kind.name, kind.meaning) for kind in all_kinds())]


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
        dtype = resolve_dtype("auto", choose_target(shipped.target_folder()).config, device)
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
        latents = None if Feature.HEADS in row.features else row.latents
        page_size = row.pages.only[0] if row.pages.only else row.pages.multiple
        needs = AttentionNeeds(device, dtype, architecture_of(device), latents=latents, page_size=page_size)
        problem = problem_of(name, needs)
        table.add_row(name, Text("no", "yellow") if problem else Text("yes", "green"), row.machine.tested, problem)
    return table


def _gpu_line(gpu: dict[str, Any]) -> str:
    memory = gpu["memory_bytes"] / 2**30
    return f"{gpu['name']}, capability {gpu['capability']}, {memory:.1f} GiB, {gpu['multiprocessors']} multiprocessors"


def _exchange_line(gpus: int) -> str:
    """How ranks on this machine's GPUs exchange, and how long that takes."""
    from specdec.parallel.symmetric.measure import measure

    STARTUP.begin("measuring how the GPUs exchange")
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
    lines = [re.sub(r"\x1b\[\d*m", "", line).split() for line in nvidia_smi("topo", "-m")]
    rows = [line for line in lines if line and re.fullmatch(r"GPU\d+", line[0]) and "X" in line]
    pairs = Counter(kind for number, row in enumerate(rows) for kind in row[number + 2 : len(rows) + 1])
    return ", ".join(f"{kind} ({count} {'pair' if count == 1 else 'pairs'})" for kind, count in pairs.items())
