"""Which tiles are fastest for products with weights of 12, 8 or 4 bits at Llama-3.1-8B's shapes.

    python benchmarks products.quantised_tiles --out benchmarks/products/results/quantised_tiles_h200.json

It needs a GPU of compute capability 9.0.  Times are medians of replays of CUDA graphs, which run through copies of a weight
that spill over L2, so that each product reads its weight from memory, as in a model.  Kernels are compiled by several processes
first.  Of quantised weights more than 64 rows are compared with cuBLAS, for which the weight is dequantised first.

Shapes: M rows, K in, N weight rows.
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

from products.tile_candidates import CANDIDATES, Stored
from specdec.ops.norm import add_rms_norm
from specdec.ops.products.dense import silu_mul
from specdec.ops.products.formats.lossless import LosslessMatrix, decode_lossless, encode_lossless
from specdec.ops.products.formats.quantised import Kind, QuantisedMatrix, dequantise, pack_factor_of, row_bytes
from specdec.ops.products.gpus import match_of
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS
from specdec.ops.products.kernels.quantised.dequantise_triton import launch_dequantise
from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper
from specdec.ops.products.partials import Partials, added_up
from specdec.ops.products.tiles.lossless import lossless_tiles
from specdec.ops.products.tiles.quantised import MAX_WARP_M, Kernel, QuantisedTiles, hopper_tiles

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FORMATS: tuple[tuple[Stored, int], ...] = (("e4m3", 0), ("e4m3", 128), ("int4", 0), ("int4", 128), ("lossless", 0))
COLD_BYTES = 200_000_000
# Rows of x, and of its tiles.
ROWS = {
    1: (1,), 6: (8,), 16: (16,), 32: (32,), 64: (64,), 96: (64, 96, 128), 128: (64, 128), 192: (64, 128, 192), 256: (128,),
    384: (128, 192), 512: (128, 192), 1024: (128, 192), 2048: (128, 192),
}  # fmt: skip
LAYERS = 4
BANDWIDTH = 4.48e12  # of an H200, as rounds/round_8b.py has it


Choice = QuantisedTiles | None  # None: cuBLAS


class Trial(NamedTuple):
    """shape: of SHAPES, for which the tiles are tried."""

    kind: Stored
    group: int
    shape: str
    tiles: QuantisedTiles

    @property
    def compiled(self) -> tuple[Stored, int, bool, QuantisedTiles]:
        """What one compiled kernel is for."""
        return self.kind, self.group, self.shape == "gate_up", self.tiles


def trials() -> list[Trial]:
    """All candidates, those of most use first."""
    found = []
    for block_m, (kind, group), shape in itertools.product((1, 32, 8, 16, 64, 128, 96, 192), FORMATS, SHAPES):
        for block_n, block_k, splits, warps, stages, slices, registers in CANDIDATES[kind].get(block_m, {}).get(shape, ()):
            alone = block_m <= MAX_WARP_M
            pack_factor = 2 if kind == "lossless" else pack_factor_of(kind)
            width = slices * 64 * pack_factor if alone else block_k
            kernel: Kernel = "warp_hopper" if alone else "warpgroup_hopper"
            tiles = QuantisedTiles(kernel, block_m, block_n, width, splits, warps, stages, slices, registers)
            found.append(Trial(kind, group, shape, tiles))
    return found


def random_weight(kind: Stored, N: int, K: int, group: int) -> QuantisedMatrix | LosslessMatrix:
    if kind != "lossless":
        return random_quantised(kind, N, K, group)
    matrix = encode_lossless((torch.randn(N, K, device="cuda") * 0.02).bfloat16())
    assert matrix is not None
    return matrix


def random_quantised(kind: Kind, N: int, K: int, group: int, zero_points: bool = False) -> QuantisedMatrix:
    qvalues = torch.randint(0, 256, (N, row_bytes(kind, K)), dtype=torch.uint8, device="cuda")
    if kind == "e4m3":
        qvalues[(qvalues & 127) == 127] = 1
    scales = torch.rand(N, K // (group or K), device="cuda") + 0.5
    below = torch.randint(-8, 8, scales.shape, dtype=torch.int8, device="cuda") if zero_points else None
    return QuantisedMatrix(kind, qvalues, scales, below, K, group)


def compile_one(trial: Trial) -> tuple[str, Trial]:
    """Checks the kernel against float64 on the way."""
    torch.set_grad_enabled(False)
    gated = trial.shape == "gate_up"
    weight = random_weight(trial.kind, 544 if gated else 528, SHAPES[trial.shape][1], trial.group)
    worst = 0.0
    try:
        size = trial.tiles.block_m
        for M in {max(1, size - 3), size, size if trial.tiles.kernel == "warp_hopper" else size + 6}:
            x = torch.randn(M, weight.columns, device="cuda", dtype=torch.bfloat16)
            error = difference(added_up(product_of(x, trial.shape, trial.tiles, weight)), x, weight, gated)
            worst = max(worst, error) if error == error else math.inf
        return ("" if worst < 4e-3 else f"{trial}: error {worst}"), trial
    except Exception as error:  # of any kind, as Triton has many: tiles that can't run are named, and the search goes on
        return f"{trial}: {type(error).__name__} {str(error)[-200:]}", trial


def difference(y: Tensor, x: Tensor, weight: QuantisedMatrix | LosslessMatrix, gated: bool) -> float:
    numbers = decode_lossless(weight).double() if isinstance(weight, LosslessMatrix) else dequantise(weight, torch.float64)
    want = x.double() @ numbers.T
    if gated:
        gate, up = want.chunk(2, -1)
        want = gate / (1 + (-gate).exp()) * up
    return ((y.double() - want).norm() / want.norm()).item()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=list(ROWS), help="rows of x")
    args = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
              "date": time.strftime("%Y-%m-%d"), "rows": [], "layers": []}  # fmt: skip
    sizes = {size for M in args.rows for size in ROWS[M]}
    todo = [each for each in trials() if each.tiles.block_m in sizes and each.kind in args.kinds]
    for found in sweep(todo, args.rows, args.kinds, args.seconds, args.processes):
        for name, rows in found.items():
            result[name] += rows
        if args.out:
            args.out.write_text(json.dumps(result) + "\n")


def sweep(
    todo: list[Trial], rows_of_x: list[int], kinds: list[Stored], seconds: float, processes: int
) -> Iterator[dict[str, list[Any]]]:
    """For each number of rows and kind a row for each shape and tiling, and whole layers with some of them."""
    start = time.time()
    done = compiled(todo, 0.5 * seconds, processes)
    print(f"{len(done)} of {len(todo)} compiled in {time.time() - start:.1f} s", flush=True)
    for M, (kind, group) in itertools.product(rows_of_x, [each for each in FORMATS if each[0] in kinds]):
        if M > 64 and kind == "lossless":
            print(f"{M} rows read no lossless weights")
            continue
        if time.time() - start > 0.95 * seconds:
            print(f"no time for {M} rows of {kind}")
            continue
        weights = {name: copies(kind, N, K, group) for name, (N, K) in SHAPES.items()}
        x = {K: torch.randn(M, K, device="cuda", dtype=torch.bfloat16) for _, K in SHAPES.values()}
        rows, best = timed([each for each in todo if each.compiled in done], M, kind, group, weights, x)
        found = layers(M, kind, best, weights, x, start + seconds)
        yield {"rows": rows, "layers": [{"group": group, **row} for row in found]}
        print(f"{time.time() - start:.1f} s", flush=True)


def compiled(todo: list[Trial], seconds: float, processes: int) -> set[Any]:
    """What was compiled in time, of which each kernel was held against float64."""
    start, done = time.time(), set[Any]()
    kernels = {trial.compiled: trial for trial in todo}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap_unordered(compile_one, kernels.values())
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


def copies(kind: Stored, N: int, K: int, group: int) -> list[QuantisedMatrix | LosslessMatrix]:
    """As many weights as spill over L2, and as layers have."""
    return [random_weight(kind, N, K, group) for _ in range(max(LAYERS, math.ceil(COLD_BYTES / (bytes_of_row(kind, K) * N))))]


def bytes_of_row(kind: Stored, K: int) -> int:
    return 3 * K // 2 if kind == "lossless" else row_bytes(kind, K)


def timed(
    todo: list[Trial],
    M: int,
    kind: Stored,
    group: int,
    weights: dict[str, list[QuantisedMatrix | LosslessMatrix]],
    x: dict[int, Tensor],
) -> tuple[list[dict[str, Any]], dict[str, list[Choice]]]:
    """A row for each tiling, and each shape's tilings, the policy's first, then from the fastest on."""
    rows: list[dict[str, Any]] = []
    best: dict[str, list[Choice]] = {}
    computed: list[Choice] = [None] if M > 64 else []
    for name, (N, K) in SHAPES.items():
        gated = name == "gate_up"
        policy = (
            lossless_tiles(M, N, K, gated, match_of(torch.device("cuda", 0)).kind)
            if kind == "lossless"
            else hopper_tiles(M, N, K, kind, group, False, gated, name in ("o", "down"))
        )
        like = kind, group, name
        tried = [each.tiles for each in todo if (each.kind, each.group, each.shape) == like and fits(each.tiles, M, N)]
        found: list[tuple[float, Choice]] = []
        for tiles in dict.fromkeys([*([] if policy is None else [policy]), *tried, *computed]):
            us = measure(weights[name], partial(product_of, x[K], name, tiles))
            found.append((round(us, 2), tiles))
        found.sort(key=lambda each: each[0])
        of = {"kind": kind, "group": group, "shape": name, "T": M}
        rows += [{**of, "tiles": tiles and list(tiles), "us": us} for us, tiles in found]
        best[name] = [policy if policy or computed else found[0][1], *(tiles for _, tiles in found)]
        limit = bytes_of_row(kind, K) * N / BANDWIDTH * 1e6
        print(kind, group, name, M, f"limit {limit:.1f}", *((us, *shown(tiles)) for us, tiles in found), flush=True)
    return rows, best


def fits(tiles: QuantisedTiles, M: int, N: int) -> bool:
    """Whether these tiles are tried with M rows, and a split product has counters enough."""
    count = math.ceil(M / tiles.block_m) * math.ceil(N / tiles.block_n) * tiles.of_program
    return tiles.block_m in ROWS[M] and (tiles.splits == 1 or count <= ARRIVALS)


def layers(
    M: int,
    kind: Stored,
    best: dict[str, list[Choice]],
    weights: dict[str, list[QuantisedMatrix | LosslessMatrix]],
    x: dict[int, Tensor],
    until: float,
) -> list[dict[str, Any]]:
    """Microseconds of a layer's four products and three norms with the policy's tiles, and with what was found to be better."""
    rows: list[dict[str, Any]] = []

    def of(choice: dict[str, Choice]) -> float:
        us = layer(choice, weights, x)
        rows.append({"kind": kind, "T": M, "us": round(us, 2), "tiles": lists(choice)})
        return us

    now = {name: tilings[0] for name, tilings in best.items()}
    at = of(now)
    print("layer", kind, M, f"policy {at:.2f}", flush=True)
    fastest = {name: tilings[1] for name, tilings in best.items()}
    if (us := of(fastest)) < at:
        now, at = fastest, us
    for name in ("gate_up", "down", "qkv", "o"):
        for tiles in best[name][:6]:
            if time.time() < until and tiles != now[name]:
                us = of({**now, name: tiles})
                print(f"    {name} {shown(tiles)} {us:.2f}", flush=True)
                if us < at - 0.05:
                    now, at = {**now, name: tiles}, us
    print("layer", kind, M, f"best {at:.2f}", {name: shown(tiles) for name, tiles in now.items()}, flush=True)
    return [*rows, {"kind": kind, "T": M, "us": round(at, 2), "best": lists(now)}]


def shown(tiles: Choice) -> tuple[Any, ...]:
    return ("cuBLAS",) if tiles is None else tuple(tiles)


def lists(choice: dict[str, Choice]) -> dict[str, list[Any] | None]:
    return {name: tiles and list(tiles) for name, tiles in choice.items()}


def layer(choice: dict[str, Choice], weights: dict[str, list[QuantisedMatrix | LosslessMatrix]], x: dict[int, Tensor]) -> float:
    norm = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    for capture in (False, True):
        with torch.cuda.graph(graph) if capture else nullcontext():
            for n, (name, (_, K)) in itertools.product(range(LAYERS), SHAPES.items()):
                y = product_of(x[K], name, choice[name], weights[name][n])
                if name != "gate_up":  # after qkv one stands in attention's place
                    add_rms_norm(x[4096], x[4096] if name == "qkv" else y, norm, 1e-5)
        torch.cuda.synchronize()
    return replay_us(graph, 9) / LAYERS


def product_of(x: Tensor, name: str, tiles: Choice, weight: QuantisedMatrix | LosslessMatrix) -> Tensor | Partials:
    """As a layer computes it: a norm adds up the partials of o and down."""
    if tiles is None:
        assert isinstance(weight, QuantisedMatrix)
        y = F.linear(x, launch_dequantise(weight, x.dtype))
        return silu_mul(y) if name == "gate_up" else y
    leaves = name in ("o", "down") and tiles.splits > 1
    y = launch_quantised_hopper(x, weight, None, name == "gate_up", tiles, leaves)
    return Partials(y, x.dtype) if leaves else y


def measure(
    weights: list[QuantisedMatrix | LosslessMatrix], product: Callable[[QuantisedMatrix | LosslessMatrix], Tensor | Partials]
) -> float:
    """Microseconds of a product."""
    todo = weights * (1 if len(weights) > 5 else 2)
    product(weights[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for weight in todo:
            product(weight)
    return replay_us(graph, 7) / len(todo)
