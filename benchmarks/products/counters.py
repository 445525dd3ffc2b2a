"""What Nsight Compute counts while a product of few rows runs, on a real GPU: where the time beyond the weight's bytes goes.

    python benchmarks products.counters [--rows 1 32 192] [--quantised-rows 1 32] [--raw FILE.csv] [--out FILE]

`ncu` (of the CUDA toolkit) runs this script again and replays each kernel a few times, alone, with empty caches and the clocks
as they are.  So a kernel's time here has no neighbour that starts it early, and is longer than in a layer: read the shares, not
the times.  The shapes are those of a layer of Llama-3.1-8B, with weights in bf16, fp8 (a scale a row) and int4 (groups of 128).

For each product: microseconds, the shares of the peak of memory, of L2 and of the tensor cores, warps an SM, and the three
causes for which warps waited longest, in cycles of waiting for each instruction.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")
MARK = "FillFunctor"  # in the name of the kernel that separates products: a fill of a small tensor
STALLS = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3}
TIME = "gpu__time_duration.sum"
SHARES = {
    "microseconds": TIME,
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "SM": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
}


def labels(rows: Sequence[int], quantised_rows: Sequence[int]) -> Iterator[tuple[str, int, str]]:
    """(weights, rows, product) in the order in which the second process multiplies."""
    for M in rows:
        yield from (("bf16", M, name) for name in ("qkv", "o", "gate_up", "down"))
    for kind in ("e4m3", "int4"):
        for M in quantised_rows:
            yield from ((kind, M, name) for name in ("qkv", "o", "gate_up", "down"))


def multiply(rows: Sequence[int], quantised_rows: Sequence[int]) -> None:
    """Every product once, each after a marking kernel; all kernels are compiled before the profiler looks."""
    import torch

    from products.gemm import LAYER, new_weight
    from products.quantised_tiles import random_quantised
    from specdec.ops.products.dense import DenseWeight
    from specdec.ops.products.numerics import FAST
    from specdec.ops.products.quantised import QuantisedWeight

    torch.set_grad_enabled(False)
    mark = torch.empty(7, device="cuda")
    for profiled in (False, True):
        for kind, M, name in labels(rows, quantised_rows):
            N, K = LAYER[name]
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            plain = kind == "bf16"
            group = 128 if kind == "int4" else 0
            weight: Any = DenseWeight(new_weight(N, K)) if plain else QuantisedWeight(random_quantised(kind, N, K, group))
            torch.cuda.synchronize()
            if profiled:
                torch.cuda.profiler.start()
            mark.fill_(1.0)
            weight.gated(x, None, FAST) if name == "gate_up" else weight.matmul(x, None, FAST)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def kernels(table: Path) -> list[dict[str, str]]:
    """The lines of Nsight Compute's raw table: for each kernel its name and its metrics, the time in microseconds."""
    units, *found = csv.DictReader(line for line in table.read_text().splitlines() if line.startswith('"'))
    for kernel in found:
        kernel[TIME] = str(float(kernel[TIME].replace(",", "")) * MICROSECONDS[units[TIME]])
    return found


def counted(kernel: dict[str, str]) -> dict[str, Any]:
    """What this benchmark shows of a kernel."""

    def number(name: str) -> float | None:
        text = kernel.get(name, "").replace(",", "")
        return float(text) if text else None

    start, end = STALLS
    stalls = [name for name in kernel if name.startswith(start) and name.endswith(end)]
    waits = {name[len(start) : -len(end)]: number(name) or 0.0 for name in stalls}
    longest = sorted(waits, key=lambda cause: -waits[cause])[:3]
    row: dict[str, Any] = {label: number(name) for label, name in SHARES.items()}
    return {"kernel": kernel["Kernel Name"]} | row | {"waits": {cause: round(waits[cause], 2) for cause in longest}}


def by_product(found: list[dict[str, str]], names: list[tuple[str, int, str]]) -> Iterator[dict[str, Any]]:
    """Each product's kernels: those after its mark."""
    at = -1
    for kernel in found:
        if MARK in kernel["Kernel Name"]:
            at += 1
        else:
            kind, M, name = names[at]
            yield {"weights": kind, "rows": M, "product": name} | counted(kernel)


def profile(arguments: Sequence[str], raw: Path) -> None:
    """Runs this script under Nsight Compute, which writes its table to `raw`."""
    tool = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    here = Path(__file__).resolve().parents[1]
    command = [tool, "--csv", "--page", "raw", "--log-file", str(raw), "--clock-control", "none", "--profile-from-start", "off"]
    command += [word for section in SECTIONS for word in ("--section", section)]
    command += [sys.executable, "-P", str(here), "products.counters", "--multiply", *arguments]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 192], help="rows of the products with bf16 weights")
    parser.add_argument(
        "--quantised-rows", type=int, nargs="+", default=[1, 32], help="rows of those with fp8 and int4 weights"
    )
    parser.add_argument("--raw", type=Path, help="where Nsight Compute's own table goes; without it, it is thrown away")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--multiply", action="store_true", help=argparse.SUPPRESS)  # what runs under ncu
    args = parser.parse_args()
    if args.multiply:
        multiply(args.rows, args.quantised_rows)
        return
    names = list(labels(args.rows, args.quantised_rows))
    with tempfile.TemporaryDirectory() as folder:
        raw = args.raw or Path(folder, "raw.csv")
        profile(["--rows", *map(str, args.rows), "--quantised-rows", *map(str, args.quantised_rows)], raw)
        found = list(by_product(kernels(raw), names))
    for row in found:
        labelled = [(label, row[label]) for label in SHARES]
        shares = "  ".join(f"{label} {value:5.1f}" for label, value in labelled if value is not None)
        print(f"{row['weights']:5} {row['rows']:4} {row['product']:8} {shares}  waits {row['waits']}  {row['kernel'][:40]}")
    if args.out:
        import torch

        about = {"device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
        about |= {"torch": version("torch"), "triton": version("triton")}
        args.out.write_text(json.dumps(about | {"products": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
