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
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from graph_timing import replay_us
from torch import Tensor

from specdec.ops.products.tiles import ProductTiles
from specdec.ops.quantised.codes import Codes, Kind, codes_a_word, dequantise, row_bytes
from specdec.ops.quantised.linear_hopper import launch_quantised_hopper
from specdec.ops.quantised.linear_triton import launch_quantised_linear
from specdec.ops.quantised.tiles import HopperTiles, kept_groups, quantised_tiles

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FORMATS: tuple[tuple[Kind, int], ...] = (("e4m3", 0), ("int4", 128))
COLD_BYTES = 200_000_000
ROWS = {8: 1, 32: 32, 64: 64}  # tiles of rows, and how many of them there are
LAYERS = 6
BANDWIDTH = 4.48e12  # of an H200, as benchmarks/round_8b.py has it


class Trial(NamedTuple):
    """shape: of SHAPES, for which the tiles are tried."""

    kind: Kind
    group: int
    shape: str
    tiles: HopperTiles

    @property
    def compiled(self) -> tuple[Kind, int, bool, HopperTiles]:
        """What one compiled kernel is for."""
        return self.kind, self.group, self.shape == "gate_up", self.tiles


# rows of the weight, slices (0: the kernel of wide products), warps, splits
FEW_ROWS = {
    "qkv": (
        (64, 2, 8, 1), (64, 4, 16, 1), (64, 1, 4, 4), (64, 2, 8, 2), (32, 2, 4, 1), (32, 4, 8, 1), (16, 4, 4, 1),
        (128, 1, 8, 5),
    ),
    "o": ((32, 4, 8, 1), (32, 8, 16, 1), (16, 4, 4, 1), (64, 2, 8, 2), (64, 4, 16, 2), (64, 1, 4, 6), (32, 2, 4, 2)),
    "gate_up": (
        (64, 1, 4, 1), (64, 2, 8, 1), (64, 4, 16, 1), (32, 2, 4, 1), (32, 4, 8, 1), (128, 1, 8, 1), (128, 2, 16, 1),
        (64, 0, 4, 1), (128, 0, 8, 1),
    ),
    "down": (
        (32, 4, 8, 1), (32, 8, 16, 1), (16, 8, 8, 1), (64, 2, 8, 2), (64, 4, 16, 2), (32, 4, 8, 2), (64, 1, 4, 6),
        (128, 2, 16, 4),
    ),
}  # fmt: skip
MORE_ROWS = {
    "qkv": ((128, 1, 8, 5), (128, 2, 8, 2), (128, 0, 8, 5), (128, 0, 8, 2), (64, 0, 4, 2), (64, 2, 8, 2)),
    "o": ((128, 1, 8, 8), (128, 2, 8, 4), (128, 0, 8, 8), (128, 0, 8, 4), (64, 0, 4, 4), (64, 2, 8, 4)),
    "gate_up": ((128, 1, 8, 1), (128, 2, 16, 1), (128, 0, 8, 1), (256, 0, 8, 1), (64, 0, 4, 1), (64, 2, 8, 1)),
    "down": ((128, 1, 8, 8), (128, 2, 8, 4), (128, 0, 8, 8), (128, 0, 8, 4), (64, 0, 4, 4), (64, 2, 8, 4)),
}


def trials() -> Iterator[Trial]:
    """Pipelines that fill shared memory, and those that leave room for the next product's programs."""
    for block_t, (kind, group), shape in itertools.product((8, 32, 64), FORMATS, SHAPES):
        for block_o, slices, warps, splits in (FEW_ROWS if block_t == 8 else MORE_ROWS)[shape]:
            a_word = codes_a_word(kind)
            if block_t == 64 and (slices or block_o < 128):
                continue
            programs = -(-SHAPES[shape][0] // block_o * splits // 132)
            widths = (slices * 64 * a_word,) if slices else (256,) if kind == "int4" and block_t < 64 else (128,)
            for block_i, room in itertools.product(widths, (programs, 2 * programs if programs < 3 else programs + 2)):
                stage = block_o * row_bytes(kind, block_i) + 2 * block_t * block_i
                groups = kept_groups(SHAPES[shape][1], group, block_i, splits)
                stages = min(12, (227_000 // room - 1500 - 4 * block_o * groups) // stage)
                if stages > 1:
                    tiles = HopperTiles(block_t, block_o, block_i, splits, warps, stages, slices)
                    yield Trial(kind, group, shape, tiles)


def random_codes(kind: Kind, O: int, I: int, group: int, zeros: bool = False) -> Codes:
    codes = torch.randint(0, 256, (O, row_bytes(kind, I)), dtype=torch.uint8, device="cuda")
    if kind == "e4m3":
        codes[(codes & 127) == 127] = 1
    dtype = torch.float32 if kind == "e4m3" else torch.bfloat16
    scales = (torch.rand(O, I // (group or I), device="cuda") + 0.5).to(dtype)
    below = torch.randint(-8, 8, scales.shape, dtype=torch.int8, device="cuda") if zeros else None
    return Codes(kind, codes, scales, below, I, group)


def compile_one(trial: Trial) -> tuple[str, Trial]:
    """Checks the kernel against float64 on the way."""
    weight = random_codes(trial.kind, 512, SHAPES[trial.shape][1], trial.group)
    x = torch.randn(trial.tiles.block_t - 3, weight.columns, device="cuda", dtype=torch.bfloat16)
    try:
        with torch.no_grad():
            error = difference(launched(x, trial.shape == "gate_up", trial.tiles, weight), x, weight, trial.shape == "gate_up")
        return ("" if error < 4e-3 else f"{trial}: error {error}"), trial
    except Exception as error:  # of any kind: tiles that can't compile or launch are named, and the search goes on
        return f"{trial}: {type(error).__name__} {str(error)[-200:]}", trial


def difference(y: Tensor, x: Tensor, weight: Codes, gated: bool) -> float:
    want = x.double() @ dequantise(weight, torch.float64).T
    if gated:
        gate, up = want.chunk(2, -1)
        want = gate / (1 + (-gate).exp()) * up
    return ((y.double() - want).norm() / want.norm()).item()


def launched(x: Tensor, gated: bool, tiles: HopperTiles | ProductTiles, weight: Codes) -> Tensor:
    if isinstance(tiles, HopperTiles):
        return launch_quantised_hopper(x, weight, None, gated, tiles)
    return launch_quantised_linear(x, weight, None, gated, tiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--processes", type=int, default=7)
    args = parser.parse_args()
    result = sweep(list(trials()), args.seconds, args.processes)
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                 "date": time.strftime("%Y-%m-%d"), **result}  # fmt: skip
        args.out.write_text(json.dumps(about) + "\n")


def sweep(todo: list[Trial], seconds: float, processes: int) -> dict[str, Any]:
    """A row for each shape, number of rows and tiling that was measured in time, and whole layers with the best."""
    start = time.time()
    todo.sort(key=lambda trial: trial.tiles.block_t)  # the most wanted first, if time runs out
    kernels = {trial.compiled: trial for trial in reversed(todo)}
    done: set[Any] = set()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap_unordered(compile_one, sorted(kernels.values(), key=lambda trial: trial.tiles.block_t))
        try:
            for _ in kernels:
                why, trial = results.next(timeout=max(0.1, 0.55 * seconds - (time.time() - start)))
                print(why, end="\n" if why else "", flush=True)
                if not why:
                    done.add(trial.compiled)
        except multiprocessing.TimeoutError:
            print("compiling was cut")
        pool.terminate()
    print(f"{len(done)} of {len(kernels)} compiled in {time.time() - start:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    best: dict[tuple[Kind, int, str], HopperTiles] = {}
    for block_t, (kind, group), (name, (O, I)) in itertools.product(ROWS, FORMATS, SHAPES.items()):
        size = row_bytes(kind, I) * O
        weights = [random_codes(kind, O, I, group) for _ in range(max(2, math.ceil(COLD_BYTES / size)))]
        x = torch.randn(ROWS[block_t], I, device="cuda", dtype=torch.bfloat16)
        found = []
        for trial in todo:
            fits = (trial.kind, trial.shape, trial.tiles.block_t) == (kind, name, block_t) and trial.compiled in done
            if fits and time.time() - start < 0.9 * seconds:
                us = measure(weights, partial(launched, x, name == "gate_up", trial.tiles))
                found.append({"kind": kind, "shape": name, "T": ROWS[block_t], "tiles": list(trial.tiles), "us": round(us, 2)})
        rows += found
        found.sort(key=lambda row: row["us"])
        if found:
            best[kind, block_t, name] = HopperTiles(*found[0]["tiles"])
        shown = [(row["us"], *row["tiles"][1:7]) for row in found[:7] + found[-1:]]
        print(kind, name, ROWS[block_t], f"limit {size / BANDWIDTH * 1e6:.1f}", *shown, flush=True)
        del weights
    layers = [layer(kind, group, block_t, best) for block_t, (kind, group) in itertools.product(ROWS, FORMATS)]
    print(f"end {time.time() - start:.1f} s", flush=True)
    return {"rows": rows, "layers": [each for each in layers if each]}


def layer(kind: Kind, group: int, block_t: int, best: dict[tuple[Kind, int, str], HopperTiles]) -> dict[str, Any]:
    """Microseconds of a layer's four products, one after another, with the best tiles, and as before."""
    if any((kind, block_t, name) not in best for name in SHAPES):
        return {}
    T = ROWS[block_t]
    weights = {name: [random_codes(kind, O, I, group) for _ in range(LAYERS)] for name, (O, I) in SHAPES.items()}
    x = {I: torch.randn(T, I, device="cuda", dtype=torch.bfloat16) for _, I in SHAPES.values()}
    us = {}
    for choice in ("best", "before"):
        graph = torch.cuda.CUDAGraph()
        for capture in (False, True):
            with torch.cuda.graph(graph) if capture else nullcontext():
                for n, (name, (O, I)) in itertools.product(range(LAYERS), SHAPES.items()):
                    tiles = best[kind, block_t, name] if choice == "best" else quantised_tiles(T, O, I, kind)
                    assert tiles is not None
                    launched(x[I], name == "gate_up", tiles, weights[name][n])
            torch.cuda.synchronize()
        us[choice] = round(replay_us(graph, 9) / LAYERS, 2)
    size = sum(w[0].codes_OJ.numel() + w[0].scales_OG.nbytes for w in weights.values())
    found = {"kind": kind, "T": T, "us": us, "limit_us": round(size / BANDWIDTH * 1e6, 2)}
    print("layer", found, flush=True)
    return found


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
