"""Products of few rows with other tiles than the policy's, at the widths of published models in bf16, on an H200.

    python benchmarks products.dense_tiles --models 27B 35B-A3B --out FILE    # about 80 seconds, of which 25 compile
    python benchmarks products.dense_tiles --models 27B --shapes out down --rows 1 48 --top 4
    python benchmarks products.dense_tiles --models SmolLM2-135M --rows 1 4 16 --top 4
    python benchmarks products.dense_tiles --models SmolLM2-135M --shapes qkv o gate_up down --rows 32 48 128 512 --top 4
    python benchmarks products.dense_tiles --models gpt-oss-20b Qwen3-30B-A3B --rows 1 6 --top 4

Each product comes right after a norm, or in front of the norm that adds up its partials, as in a layer.  The time is that of
both in a CUDA graph that runs through copies of the weight, so that none lies in L2.  TB/s: the weight's bytes over that time.
What wins here is for `_tiles_hopper`, and of small weights for `_tiles_in_registers` (specdec/ops/products/tiles/dense.py).

Shapes: M rows, K in, N weight rows, H hidden.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from products.gemm import COLD_BYTES, graph_us, new_weight
from specdec.ops.norm import add_rms_norm
from specdec.ops.products.dense import partials_with_tiles, with_tiles
from specdec.ops.products.gpus import H200
from specdec.ops.products.partials import Partials
from specdec.ops.products.tiles.dense import (
    FEW,
    FEW_COLUMNS,
    HALF_SM,
    HELD_NUMBERS,
    MOST_WORDS,
    SMS,
    WHOLE_SM,
    ProductTiles,
    padded_rows,
    product_tiles,
)

# Weights [N, K] by name; the norm after `out`, `o` and `down` adds up partials.
SHAPES: dict[str, dict[str, tuple[int, int]]] = {
    "27B": {
        "in": (16480, 5120), "out": (5120, 6144), "qkv": (14336, 5120), "gate_up": (34816, 5120), "down": (5120, 17408),
        "lm_head": (248320, 5120),
    },
    "35B-A3B": {"in": (12352, 2048), "out": (2048, 4096), "qkv": (9216, 2048), "lm_head": (248320, 2048)},
    "SmolLM2-135M": {
        "qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576),
        "draft lm_head": (32000, 576),
    },
    "gpt-oss-20b": {"qkv": (5120, 2880), "o": (2880, 4096), "lm_head": (201088, 2880)},
    "Qwen3-30B-A3B": {"qkv": (5120, 2048), "o": (2048, 4096), "lm_head": (151936, 2048)},
}  # fmt: skip
ADDED = ("out", "o", "down")
ROOM = {1: WHOLE_SM, 2: HALF_SM, 3: 74_000}  # bytes of a program's stages, by programs of an SM
# Weight rows and columns of a step, and programs of an SM.  With more rows of x, tiles of more weight rows read x less often.
PIECES = ((64, 256, 1), (64, 256, 2), (64, 128, 1), (64, 128, 2), (64, 128, 3), (128, 128, 1), (128, 128, 2), (128, 256, 1))
MORE = ((128, 64, 2), (256, 64, 1), (256, 128, 1))  # from MANY rows of x on
MANY, MOST_ROWS = 32, 256  # MOST_ROWS: of x, that stream_hopper.py's tile has


class CompiledTiles(NamedTuple):
    """What is compiled once.  K: columns, if the kernel is compiled for them."""

    tiles: ProductTiles
    gated: bool
    partials: bool
    K: int


def in_registers(M: int, N: int, K: int, parts: int) -> Iterator[ProductTiles]:
    """Of weights that are small, or up to 16 rows have few columns: a thread's registers hold its part.  parts: 2 if gated."""
    if N * K > HELD_NUMBERS and (M > 16 or K >= FEW_COLUMNS):
        return
    if M == 1:
        for block_k, warps, each in itertools.product((64, 128, 256), (4, 8), (1, 2)):
            if 4 * -(-K // block_k) * each * parts <= MOST_WORDS:
                yield ProductTiles("one_row_hopper", 1, warps * 256 // block_k * each, block_k, 1, warps, 1)
        return
    of_x = (8,) if M <= 8 else (16,) if M <= 16 else (16, 32, 64)
    for block_m, rows, warps in itertools.product(of_x, (16, 32, 64), (2, 4, 8, 16)):
        fits = M <= 16 or (rows * block_m <= 1024 and warps <= 8)
        if -(-K // (32 * warps)) * rows // 2 <= MOST_WORDS and fits:
            yield ProductTiles("held_rows_hopper", block_m, rows, 32, 1, warps, 1)


def tiled(M: int, N: int, K: int) -> Iterator[ProductTiles]:
    """Of small weights and more than 16 rows of x: tiles in a pipeline, of any number of rows, and of up to FEW."""
    if M <= 16 or N * K > HELD_NUMBERS:
        return
    for block_m, block_n, block_k in itertools.product((32, 64, 128), (32, 64, 128), (64, 128)):
        programs, stage = -(-M // block_m) * -(-N // block_n), (block_m + block_n) * block_k * 2
        if programs <= 4 * SMS and block_m < 2 * M:
            yield ProductTiles("tiled_triton", block_m, block_n, block_k, 1, 4, min(6, -(-K // block_k), HALF_SM // stage))
    if M <= FEW:
        for block_n, block_k in itertools.product((16, 32, 64), (64, 128)):
            yield ProductTiles("stream_triton", 1 << (M - 1).bit_length(), block_n, block_k, 1, 4, min(6, -(-K // block_k)))


def candidates(M: int, N: int, K: int, gated: bool) -> list[ProductTiles]:
    """With so many splits that each SM has one program, or as many as fit on it; and those of small weights."""
    found: dict[ProductTiles, None] = {}
    block_m = padded_rows(M)
    for rows, block_k, share in PIECES + (MORE if M >= MANY else ()) if block_m <= MOST_ROWS else ():
        stages = min(12, ROOM[share] // ((rows + block_m) * block_k * 2))
        tiles = -(-N // rows)
        for splits in {1, max(1, SMS // tiles), max(1, share * SMS // tiles)}:
            if stages >= 2 and splits <= -(-K // (2 * block_k)):
                found[ProductTiles("stream_hopper", block_m, rows, block_k, splits, min(8, rows // 16), stages)] = None
    return [*found, *in_registers(M, N, K, 2 if gated else 1), *tiled(M, N, K)]


def policy(M: int, N: int, K: int, gated: bool, partials: bool) -> ProductTiles | None:
    return product_tiles(M, N, K, torch.bfloat16, gated, H200, partials)


def kernels_of(models: list[str], names: list[str], rows: list[int]) -> Iterator[CompiledTiles]:
    for name, (N, K) in ((name, shape) for model in models for name, shape in SHAPES[model].items() if name in names):
        for M in rows:
            gated = name == "gate_up"
            own = policy(M, N, K, gated, name in ADDED)
            for tiles in [*candidates(M, N, K, gated), *([own] if own else [])]:
                columns = K if tiles.kernel in ("one_row_hopper", "held_rows_hopper") else 4096
                yield CompiledTiles(tiles, gated, name in ADDED and tiles.splits > 1, columns)


def compile_one(kernel: CompiledTiles) -> str:
    """In a process of its own, on a small weight: what was compiled is found by the others on disk."""
    x_MK, weight_NK = (torch.zeros(rows, kernel.K, device="cuda", dtype=torch.bfloat16) for rows in (1, 2048))
    try:
        with torch.no_grad():
            if kernel.partials:
                partials_with_tiles(x_MK, weight_NK, kernel.tiles)
            else:
                with_tiles(x_MK, weight_NK, kernel.gated, kernel.tiles)
    except OutOfResources as error:  # the other tiles are measured
        return f"{kernel}: {type(error).__name__}: {error}"[:200]
    return ""


class TimedProduct:
    """Copies of one weight, and its product for M rows with the norm beside it."""

    def __init__(self, name: str, N: int, K: int) -> None:
        self.name, self.N, self.K, self.gated, self.adds = name, N, K, name == "gate_up", name in ADDED
        self.bytes = 2 * N * K
        weights = [new_weight(N, K) for _ in range(max(2, math.ceil(COLD_BYTES / self.bytes)))]
        self.todo = weights * math.ceil((2 if self.bytes > 1e9 else 8) / len(weights))

    def us(self, M: int, tiles: ProductTiles | None) -> float:
        H = self.N if self.adds else self.K
        x_MH, x_MK = (torch.randn(M, width, device="cuda", dtype=torch.bfloat16) for width in (H, self.K))
        norm_H = torch.ones(H, device="cuda")

        def product(x: Tensor, weight: Tensor) -> Tensor | Partials:
            if self.adds and tiles is not None and tiles.splits > 1:
                return partials_with_tiles(x, weight, tiles)
            return with_tiles(x, weight, self.gated, tiles)

        def step() -> None:
            for weight in self.todo:
                if self.adds:
                    add_rms_norm(x_MH, product(x_MK, weight), norm_H, 1e-6)
                else:
                    product(add_rms_norm(x_MH, x_MH, norm_H, 1e-6)[1], weight)

        return graph_us(step, 9) / len(self.todo)


def measure(product: TimedProduct, M: int) -> dict[str, Any]:
    own = policy(M, product.N, product.K, product.gated, product.adds)
    found: dict[str, float] = {}
    for tiles in candidates(M, product.N, product.K, product.gated):
        try:
            found[str([*([] if tiles.kernel == "stream_hopper" else [tiles.kernel]), *tiles[1:]])] = product.us(M, tiles)
        except OutOfResources as error:
            print(f"{product.name} {tiles}: {type(error).__name__}: {error}"[:200])
    best = dict(sorted(found.items(), key=lambda item: item[1]))
    shape = {"shape": product.name, "N": product.N, "K": product.K, "bytes": product.bytes, "rows": M}
    return shape | {"policy": own and list(own), "policy_us": product.us(M, own), "found_us": best}


def show(row: dict[str, Any], top: int) -> None:
    def rate(us: float) -> str:
        return f"{us:7.1f} us {row['bytes'] / us / 1e6:5.2f} TB/s"

    best = ", ".join(f"{rate(us)} {tiles}" for tiles, us in list(row["found_us"].items())[:top])
    print(
        f"{row['shape']:>8} {row['rows']:>3} rows: {rate(row['policy_us'])} {(row['policy'] or ['cublas'])[1:]} | {best}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    names = sorted({name for shapes in SHAPES.values() for name in shapes})
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 48])
    parser.add_argument("--top", type=int, default=1, help="how many of the best tiles are printed")
    parser.add_argument("--workers", type=int, default=24, help="processes that compile")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    todo = list(dict.fromkeys(kernels_of(args.models, args.shapes, args.rows)))
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        print(*filter(None, pool.map(compile_one, todo, chunksize=1)), sep="\n")
    print(f"{len(todo)} kernels in {time.perf_counter() - began:.0f} s; policy | best, with a norm", flush=True)
    rows = []
    with torch.no_grad():
        for model in args.models:
            print(model)
            for name in (name for name in SHAPES[model] if name in args.shapes):
                product = TimedProduct(name, *SHAPES[model][name])
                for M in args.rows:
                    rows.append({"model": model} | measure(product, M))
                    show(rows[-1], args.top)
                del product
                torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s in all")
    if args.out:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
