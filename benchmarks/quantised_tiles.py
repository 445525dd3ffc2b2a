#!/usr/bin/env python3
"""Which tiles are fastest for products of few rows with weights of 8 or 4 bits, at Llama-3.1-8B's shapes, on a real GPU.

    python benchmarks/quantised_tiles.py --out benchmarks/results/quantised_tiles_h200.json

Times are medians of replays of CUDA graphs, which run through copies of a weight that spill over L2, so that each product reads
its weight from memory, as in a model.  Kernels are compiled by several processes first.

Shapes: T rows, I in, O weight rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from graph_timing import replay_us
from torch import Tensor

from specdec.ops.products.tiles import ProductTiles
from specdec.ops.quantised.codes import Codes, Kind, dequantise, row_bytes
from specdec.ops.quantised.dequantise_triton import launch_dequantise
from specdec.ops.quantised.linear_triton import launch_quantised_linear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FORMATS: tuple[tuple[Kind, int], ...] = (("e4m3", 0), ("int4", 128))
COLD_BYTES = 200_000_000
ROWS = {1: 8, 32: 32, 128: 128}  # rows of x, and the tiles that hold them
BANDWIDTH = 4.48e12  # of an H200, as benchmarks/round_8b.py has it


class Trial(NamedTuple):
    kind: Kind
    group: int
    gated: bool
    tiles: ProductTiles


def trials() -> Iterator[Trial]:
    """Programs whose warps have 16 or 32 rows of the weight each, so that every code is converted once."""
    for kind, group in FORMATS:
        for block_t, gated, forms, columns, splits in (
            (8, True, ((32, 2), (64, 2), (64, 4), (128, 4), (128, 8)), ((256, 3), (256, 5), (128, 6)), (1,)),
            (8, True, ((64, 2), (64, 4), (128, 4)), ((512, 2),), (1,)),
            (8, False, ((16, 1), (32, 2), (64, 2), (64, 4), (128, 4)), ((256, 4), (128, 6)), (1,)),
            (8, False, ((32, 2), (64, 2), (64, 4), (128, 4)), ((256, 3), (256, 5)), (2, 4)),
            (32, True, ((64, 4), (128, 4), (128, 8), (64, 2)), ((128, 4), (256, 3)), (1,)),
            (32, False, ((64, 4), (128, 4), (64, 2), (32, 2)), ((128, 4), (256, 3)), (1, 4)),
            (128, True, ((64, 4), (128, 8), (128, 4)), ((128, 3),), (1,)),
            (128, False, ((64, 4), (128, 8), (128, 4)), ((128, 3),), (1,)),
        ):
            for (block_o, warps), (block_i, stages), split in itertools.product(forms, columns, splits):
                if stages * (block_o * row_bytes(kind, block_i) + 2 * block_t * block_i) <= 220_000:
                    yield Trial(kind, group, gated, ProductTiles(block_t, block_o, block_i, split, warps, stages))


def random_codes(kind: Kind, O: int, I: int, group: int, zeros: bool = False) -> Codes:
    codes = torch.randint(0, 256, (O, row_bytes(kind, I)), dtype=torch.uint8, device="cuda")
    if kind == "e4m3":
        codes[(codes & 127) == 127] = 1
    dtype = torch.float32 if kind == "e4m3" else torch.bfloat16
    scales = (torch.rand(O, I // (group or I), device="cuda") + 0.5).to(dtype)
    below = torch.randint(-8, 8, scales.shape, dtype=torch.int8, device="cuda") if zeros else None
    return Codes(kind, codes, scales, below, I, group)


def compile_one(trial: Trial) -> tuple[str, Trial]:
    weight = random_codes(trial.kind, 512, 4096, trial.group)
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    try:
        with torch.no_grad():
            launch_quantised_linear(x, weight, None, trial.gated, trial.tiles)
        torch.cuda.synchronize()
    except Exception as error:  # of any kind: tiles that can't compile or launch are named, and the search goes on
        return f"{trial}: {type(error).__name__} {str(error)[:100]}", trial
    return "", trial


def check() -> None:
    """Prints which formats' products are not the exact ones, or whose numbers are others than the definition's."""
    formats: tuple[tuple[Kind, int, bool], ...] = (
        ("e4m3", 0, False), ("e4m3", 128, False), ("int8", 0, False), ("int8", 128, True), ("int4", 128, False),
        ("int4", 128, True), ("int4", 32, True), ("int4", 0, False), ("e2m1", 32, False), ("e2m1", 16, False),
    )  # fmt: skip
    bad = []
    for (kind, group, zeros), (T, gated, splits) in itertools.product(formats, ((1, False, 2), (8, True, 1), (70, False, 1))):
        weight = random_codes(kind, 256, 2048, group, zeros)
        x = torch.randn(T, 2048, device="cuda", dtype=torch.bfloat16)
        y = launch_quantised_linear(x, weight, None, gated, ProductTiles(8 if T <= 8 else 64, 64, 128, splits, 4, 3))
        want = x.double() @ dequantise(weight, torch.float64).T
        if gated:
            gate, up = want.chunk(2, -1)
            want = gate / (1 + (-gate).exp()) * up
        error = ((y.double() - want).norm() / want.norm()).item()
        if not error < 3e-3 or not torch.equal(launch_dequantise(weight, x.dtype), dequantise(weight, x.dtype)):
            bad.append((kind, group, zeros, T, error))
    print("wrong:", bad or "nothing", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--processes", type=int, default=7)
    args = parser.parse_args()
    rows = sweep(list(trials()), args.seconds, args.processes)
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                 "date": time.strftime("%Y-%m-%d"), "rows": rows}  # fmt: skip
        args.out.write_text(json.dumps(about) + "\n")


def sweep(todo: list[Trial], seconds: float, processes: int) -> list[dict[str, Any]]:
    """A row for each shape, number of rows and tiling that was measured in time."""
    start = time.time()
    todo.sort(key=lambda trial: trial.tiles.block_t)  # the most wanted first, if time runs out
    done: set[Trial] = set()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        check()
        results = pool.imap_unordered(compile_one, todo)
        try:
            for _ in todo:
                why, trial = results.next(timeout=max(0.1, 0.65 * seconds - (time.time() - start)))
                print(why, end="\n" if why else "")
                if not why:
                    done.add(trial)
        except multiprocessing.TimeoutError:
            print(f"{len(done)} compiled in time")
        pool.terminate()
    print(f"{len(done)} of {len(todo)} compiled in {time.time() - start:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for (kind, group), (name, (O, I)) in itertools.product(FORMATS, SHAPES.items()):
        size = row_bytes(kind, I) * O
        weights = [random_codes(kind, O, I, group) for _ in range(max(2, math.ceil(COLD_BYTES / size)))]
        for T, block_t in ROWS.items():
            x = torch.randn(T, I, device="cuda", dtype=torch.bfloat16)
            for trial in done:
                fits = trial.kind == kind and trial.gated == (name == "gate_up") and trial.tiles.block_t == block_t
                if fits and time.time() - start < seconds:
                    us = measure(weights, partial(_launched, x, trial))
                    rows.append({"kind": kind, "shape": name, "T": T, "tiles": list(trial.tiles), "us": round(us, 2)})
            best = sorted(
                (row for row in rows if (row["kind"], row["shape"], row["T"]) == (kind, name, T)), key=lambda r: r["us"]
            )
            print(
                kind,
                name,
                T,
                f"limit {size / BANDWIDTH * 1e6:.1f}",
                *[(r["us"], *r["tiles"][1:6]) for r in best[:7]],
                flush=True,
            )
        for T in (128, 512):  # the numbers in a scratch, which cuBLAS reads
            x = torch.randn(T, I, device="cuda", dtype=torch.bfloat16)
            us = measure(weights[:2], partial(_through_scratch, x))
            plain = launch_dequantise(weights[0], x.dtype)
            alone = measure(weights[:1], partial(_by_cublas, x, plain))
            rows.append({"kind": kind, "shape": name, "T": T, "tiles": None, "us": round(us, 2), "cublas_us": round(alone, 2)})
            print(kind, name, T, f"scratch and cuBLAS {us:.1f}, of which cuBLAS {alone:.1f}", flush=True)
        del weights
    print(f"end {time.time() - start:.1f} s", flush=True)
    return rows


def _launched(x: Tensor, trial: Trial, weight: Codes) -> Tensor:
    return launch_quantised_linear(x, weight, None, trial.gated, trial.tiles)


def _through_scratch(x: Tensor, weight: Codes) -> Tensor:
    return F.linear(x, launch_dequantise(weight, x.dtype))


def _by_cublas(x: Tensor, plain: Tensor, weight: Codes) -> Tensor:
    return F.linear(x, plain)


def measure(weights: list[Codes], product: Callable[[Codes], Tensor]) -> float:
    """Microseconds of a product."""
    todo = weights * (1 if len(weights) > 5 else 2)
    product(weights[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for weight in todo:
            product(weight)
    return replay_us(graph, 7) / len(todo)


if __name__ == "__main__":
    with torch.no_grad():
        main()
