"""Which tiles are fastest for products of few rows with weights of 8 or 4 bits, at Llama-3.1-8B's shapes, on a real GPU.

    python benchmarks products.quantised_tiles --out benchmarks/products/results/quantised_tiles_h200.json

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
import torch.nn.functional as F
import triton
from graph_timing import replay_us
from torch import Tensor

from specdec.ops.products.linear import silu_mul
from specdec.ops.products.tiles import ProductTiles
from specdec.ops.quantised.codes import Codes, Kind, codes_a_word, dequantise, row_bytes
from specdec.ops.quantised.dequantise_triton import launch_dequantise
from specdec.ops.quantised.linear_hopper import launch_quantised_hopper
from specdec.ops.quantised.linear_triton import launch_quantised_linear
from specdec.ops.quantised.tiles import HopperTiles, kept_groups, quantised_tiles

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FORMATS: tuple[tuple[Kind, int], ...] = (("e4m3", 0), ("int4", 128))
COLD_BYTES = 200_000_000
ROWS = {1: 1, 32: 32, 6: 8, 64: 64, 128: 128, 256: 128}  # rows of x, and the tiles that hold them
LAYERS = 6
BANDWIDTH = 4.48e12  # of an H200, as rounds/round_8b.py has it


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


# For tiles of so many rows of x: rows of the weight, slices (0: the kernel of wide products), warps, splits.
FORMS = {
    1: {
        "qkv": (
            (64, 1, 4, 4), (64, 1, 4, 2), (64, 2, 8, 2), (32, 4, 8, 1), (32, 2, 4, 1), (16, 4, 4, 1), (64, 2, 4, 2),
            (32, 4, 4, 1), (128, 1, 4, 5),
        ),
        "o": (
            (32, 4, 8, 1), (32, 8, 16, 1), (16, 4, 4, 1), (16, 8, 8, 1), (64, 1, 4, 4), (64, 2, 8, 2), (32, 4, 4, 1),
            (32, 2, 4, 2), (64, 4, 8, 2),
        ),
        "gate_up": ((64, 1, 4, 1), (128, 1, 8, 1), (64, 2, 8, 1), (64, 2, 4, 1), (128, 1, 4, 1)),
        "down": (
            (32, 4, 8, 1), (32, 8, 16, 1), (16, 8, 8, 1), (16, 4, 4, 1), (64, 1, 4, 4), (64, 2, 8, 4), (64, 2, 8, 2),
            (64, 4, 8, 2), (64, 4, 16, 2), (32, 4, 4, 1),
        ),
    },
    8: {
        "qkv": ((64, 1, 4, 4), (64, 1, 4, 2), (32, 2, 4, 1), (64, 0, 4, 2)),
        "o": ((64, 1, 4, 4), (32, 2, 4, 2), (32, 4, 8, 1), (64, 0, 4, 2)),
        "gate_up": ((64, 1, 4, 1), (128, 1, 8, 1), (128, 0, 4, 1), (64, 0, 4, 1)),
        "down": ((64, 1, 4, 4), (64, 2, 8, 4), (32, 4, 8, 1), (64, 0, 4, 4)),
    },
    32: {
        "qkv": ((64, 0, 4, 2), (64, 0, 4, 1), (128, 0, 8, 2)),
        "o": ((64, 0, 4, 2), (64, 0, 4, 4), (128, 0, 8, 4)),
        "gate_up": ((64, 0, 4, 1), (128, 0, 8, 1), (128, 0, 4, 1)),
        "down": ((64, 0, 4, 2), (64, 0, 4, 4), (128, 0, 8, 4)),
    },
    64: {
        "qkv": ((64, 0, 4, 2), (64, 0, 4, 1)),
        "o": ((64, 0, 4, 2), (64, 0, 4, 4)),
        "gate_up": ((64, 0, 4, 1), (128, 0, 8, 1), (128, 0, 4, 1)),
        "down": ((64, 0, 4, 2), (64, 0, 4, 4)),
    },
    128: {
        "qkv": ((64, 0, 4, 1), (128, 0, 8, 1)),
        "o": ((64, 0, 4, 2), (128, 0, 8, 2)),
        "gate_up": ((64, 0, 4, 1), (128, 0, 8, 1)),
        "down": ((64, 0, 4, 2), (128, 0, 8, 4)),
    },
}  # fmt: skip


def trials() -> Iterator[Trial]:
    """Pipelines that fill shared memory, and those that leave room for the next product's programs."""
    for block_t, (kind, group), shape in itertools.product(FORMS, FORMATS, SHAPES):
        O, I = SHAPES[shape]
        for block_o, slices, warps, splits in FORMS[block_t][shape]:
            programs = -(-O // block_o * splits // 132)
            widths = (slices * 64 * codes_a_word(kind),) if slices else (256,) if block_t < 32 else (128, 256)
            for block_i, room in itertools.product(widths, (programs, 2 * programs if programs < 3 else programs + 2)):
                if block_t > 16 and programs > 1 and room != programs:
                    continue
                stage = block_o * row_bytes(kind, block_i) + (2 * block_t * block_i if block_t > 1 else 0)
                kept = 4 * block_o * kept_groups(I, group, block_i, splits) + (2 * I // splits if block_t == 1 else 0)
                stages = min(12, (227_000 // room - 3000 - kept) // stage)
                if stages > 1:
                    yield Trial(kind, group, shape, HopperTiles(block_t, block_o, block_i, splits, warps, stages, slices))


def random_codes(kind: Kind, O: int, I: int, group: int, zeros: bool = False) -> Codes:
    codes = torch.randint(0, 256, (O, row_bytes(kind, I)), dtype=torch.uint8, device="cuda")
    if kind == "e4m3":
        codes[(codes & 127) == 127] = 1
    scales = torch.rand(O, I // (group or I), device="cuda") + 0.5
    below = torch.randint(-8, 8, scales.shape, dtype=torch.int8, device="cuda") if zeros else None
    return Codes(kind, codes, scales, below, I, group)


def compile_one(trial: Trial) -> tuple[str, Trial]:
    """Checks the kernel against float64 on the way."""
    weight = random_codes(trial.kind, 512, SHAPES[trial.shape][1], trial.group)
    x = torch.randn(max(1, trial.tiles.block_t - 3), weight.columns, device="cuda", dtype=torch.bfloat16)
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


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    done = compiled(todo, 0.5 * seconds, processes)
    print(f"{len(done)} compiled in {time.time() - start:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    for T in ROWS:
        found, best = timed([trial for trial in todo if trial.compiled in done], T, start + 0.95 * seconds)
        rows += found
        layers += [layer(kind, group, T, best) for kind, group in FORMATS if T <= 64]
    print(f"end {time.time() - start:.1f} s", flush=True)
    return {"rows": rows, "layers": [each for each in layers if each]}


def compiled(todo: list[Trial], seconds: float, processes: int) -> set[Any]:
    """What was compiled in time, of which each kernel was held against float64."""
    start, done = time.time(), set[Any]()
    kernels = {trial.compiled: trial for trial in reversed(todo)}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap_unordered(compile_one, sorted(kernels.values(), key=lambda trial: trial.tiles.block_t))
        try:
            for _ in kernels:
                why, trial = results.next(timeout=max(0.1, seconds - (time.time() - start)))
                print(why, end="\n" if why else "", flush=True)
                if not why:
                    done.add(trial.compiled)
        except multiprocessing.TimeoutError:
            print(f"{len(kernels) - len(done)} of {len(kernels)} not compiled in time")
        pool.terminate()
    return done


def timed(todo: list[Trial], T: int, until: float) -> tuple[list[dict[str, Any]], dict[tuple[Kind, int, str], HopperTiles]]:
    """A row for each tiling that was measured in time, and the best tiles."""
    rows: list[dict[str, Any]] = []
    best: dict[tuple[Kind, int, str], HopperTiles] = {}
    for (kind, group), (name, (O, I)) in itertools.product(FORMATS, SHAPES.items()):
        size = row_bytes(kind, I) * O
        weights = [random_codes(kind, O, I, group) for _ in range(max(2, math.ceil(COLD_BYTES / size)))]
        x = torch.randn(T, I, device="cuda", dtype=torch.bfloat16)
        found = []
        for trial in todo:
            if (trial.kind, trial.shape, trial.tiles.block_t) == (kind, name, ROWS[T]) and time.time() < until:
                us = measure(weights, partial(launched, x, name == "gate_up", trial.tiles))
                found.append({"kind": kind, "shape": name, "T": T, "tiles": list(trial.tiles), "us": round(us, 2)})
        rows += found
        found.sort(key=lambda row: row["us"])
        if found:
            best[kind, T, name] = HopperTiles(*found[0]["tiles"])
        shown = [(row["us"], *row["tiles"][1:7]) for row in found[:6] + found[-1:]]
        print(kind, name, T, f"limit {size / BANDWIDTH * 1e6:.1f}", *shown, flush=True)
        if T > 64 and time.time() < until:
            us = measure(weights, partial(through_scratch, x, name == "gate_up"))
            rows.append({"kind": kind, "shape": name, "T": T, "tiles": None, "us": round(us, 2)})
            print(f"    through a scratch {us:.1f}", flush=True)
        del weights
    return rows, best


def layer(kind: Kind, group: int, T: int, best: dict[tuple[Kind, int, str], HopperTiles]) -> dict[str, Any]:
    """Microseconds of a layer's four products, one after another, with the best tiles, and as before."""
    if any((kind, T, name) not in best for name in SHAPES):
        return {}
    weights = {name: [random_codes(kind, O, I, group) for _ in range(LAYERS)] for name, (O, I) in SHAPES.items()}
    x = {I: torch.randn(T, I, device="cuda", dtype=torch.bfloat16) for _, I in SHAPES.values()}
    us = {}
    for choice in ("best", "before"):
        graph = torch.cuda.CUDAGraph()
        for capture in (False, True):
            with torch.cuda.graph(graph) if capture else nullcontext():
                for n, (name, (O, I)) in itertools.product(range(LAYERS), SHAPES.items()):
                    tiles = best[kind, T, name] if choice == "best" else quantised_tiles(T, O, I, kind)
                    assert tiles is not None
                    launched(x[I], name == "gate_up", tiles, weights[name][n])
            torch.cuda.synchronize()
        us[choice] = round(replay_us(graph, 9) / LAYERS, 2)
    size = sum(w[0].codes_OJ.numel() + w[0].scales_OG.nbytes for w in weights.values())
    found = {"kind": kind, "T": T, "us": us, "limit_us": round(size / BANDWIDTH * 1e6, 2)}
    print("layer", found, flush=True)
    return found


def through_scratch(x: Tensor, gated: bool, weight: Codes) -> Tensor:
    y = F.linear(x, launch_dequantise(weight, x.dtype))
    return silu_mul(y) if gated else y


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
