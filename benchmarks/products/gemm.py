"""Our products with few rows against cuBLAS, on a real GPU: the shapes of Llama-3.1-8B and its EAGLE-3 head, in bf16.

    python benchmarks products.gemm [--out FILE] [--rows 128 192]

Times are medians of CUDA-graph replays.  A graph runs through copies of a weight that spill over L2, so each product reads
its weight from memory, as in a model.  gate_up includes SiLU-mul on both sides (ours fused, cuBLAS and then our kernel).
After that come the shipped pair's shapes in float32 (these stay in L2), SiLU-mul alone at a prefill's sizes, and a whole
forward: 32 layers without and with their norms (one more norm stands in attention's place), and the LM head.  With --rows only
the bf16 shapes and the forward are measured, at these rows, and with --forwards only the forward.

Shapes: M rows, K in, N weight rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from graph_timing import replay_us
from torch import Tensor

from specdec.ops.norm import add_rms_norm, rms_norm
from specdec.ops.products.dense import gated_linear, linear, silu_mul
from specdec.ops.products.gpus import match_of
from specdec.ops.products.tiles.dense import product_tiles

DEVICE, DTYPE, EPS = "cuda", torch.bfloat16, 1e-5
COLD_BYTES = 250_000_000
LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SHAPES = LAYER | {"lm_head": (128256, 4096)}
SHAPES |= {"draft qkv": (6144, 8192), "draft fc": (4096, 12288), "draft lm_head": (32000, 4096)}
SMALL = {"small qkv": (384, 256), "small o": (256, 256), "small gate_up": (1400, 256), "small down": (256, 700)}
ROWS = (1, 6, 8, 16, 32, 64, 128, 192)
PREFILL_ROWS = (1024, 8192, 32768)
READ_BANDWIDTH = {"H100": 3.06e12, "H200": 4.48e12}  # bytes per second, as measured by large sums
FORWARD_ROWS = (1, 6, 8, 32, 60, 128, 192)

Product = Callable[[Tensor, Tensor], Tensor]


def graph_us(step: Callable[[], object], replays: int = 25) -> float:
    """Microseconds of one replay of `step`, captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return replay_us(graph, replays)


def new_weight(N: int, K: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(N, K, device=DEVICE, dtype=dtype).mul_(K**-0.5)


def cublas_gated(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    return silu_mul(F.linear(x_MK, weight_NK))


def products(name: str) -> dict[str, Product]:
    if name.endswith("gate_up"):
        return {"ours": gated_linear, "cublas": cublas_gated}
    return {"ours": linear, "cublas": F.linear}


def time_shape(name: str, N: int, K: int, dtype: torch.dtype, rows: Sequence[int]) -> list[dict[str, Any]]:
    size = N * K * dtype.itemsize
    small = size < 8_000_000
    weights = [new_weight(N, K, dtype) for _ in range(8 if small else max(2, math.ceil(COLD_BYTES / size)))]
    todo = weights * math.ceil((64 if small else 8) / len(weights))  # a graph long enough that its start does not count
    out = []
    for M in rows:
        x_MK = torch.randn(M, K, device=DEVICE, dtype=dtype)
        row: dict[str, Any] = {"shape": name, "O": N, "I": K, "dtype": str(dtype)[6:], "T": M}
        for which, product in products(name).items():
            us = graph_us(lambda: [product(x_MK, w) for w in todo]) / len(todo)  # noqa: B023
            row[f"{which}_us"], row[f"{which}_TB/s"] = round(us, 1), round(size / us / 1e6, 2)
        tiles = product_tiles(M, N, K, dtype, name.endswith("gate_up"), match_of(x_MK.device).kind)
        row["policy"] = "cublas" if tiles is None else list(tiles)
        out.append(row)
        print(json.dumps(row))
    return out


def time_silu_mul(M: int, F_: int = 14336) -> dict[str, Any]:
    gate_up_M2F = torch.randn(M, 2 * F_, device=DEVICE, dtype=DTYPE)
    us = graph_us(lambda: [silu_mul(gate_up_M2F) for _ in range(4)]) / 4
    row = {"silu_mul": F_, "T": M, "us": round(us, 1), "TB/s read and written": round(gate_up_M2F.nbytes * 1.5 / us / 1e6, 2)}
    print(json.dumps(row))
    return row


class Forward:
    """A target's pass without its attention: what every layer reads and launches, in order."""

    def __init__(self, layers: int = 32) -> None:
        self.layers = [{name: new_weight(*shape) for name, shape in LAYER.items()} for _ in range(layers)]
        self.head = new_weight(*SHAPES["lm_head"])
        self.norm_H = torch.ones(LAYER["o"][0], device=DEVICE, dtype=DTYPE)

    def bytes(self) -> int:
        return sum(w.nbytes for layer in self.layers for w in layer.values()) + self.head.nbytes

    def run(self, x_MH: Tensor, product: Product, gated: Product, norms: bool) -> Tensor:
        H, delta_MH = x_MH.shape[1], x_MH
        for layer in self.layers:
            if norms:
                x_MH, normed_MH = add_rms_norm(x_MH, delta_MH, self.norm_H, EPS)
            qkv = product(normed_MH if norms else x_MH, layer["qkv"])
            heads_MH = rms_norm(qkv[:, :H], self.norm_H, EPS) if norms else qkv[:, :H]
            delta_MH = product(heads_MH, layer["o"])
            if norms:
                x_MH, normed_MH = add_rms_norm(x_MH, delta_MH, self.norm_H, EPS)
            delta_MH = product(gated(normed_MH if norms else delta_MH, layer["gate_up"]), layer["down"])
        return product(rms_norm(delta_MH, self.norm_H, EPS) if norms else delta_MH, self.head)

    def time(self, M: int) -> dict[str, Any]:
        x_MH = torch.randn(M, self.norm_H.shape[0], device=DEVICE, dtype=DTYPE)
        row: dict[str, Any] = {"forward": f"{len(self.layers)} layers + lm_head", "T": M}
        row["byte_limit_us"] = round(self.bytes() / (READ_BANDWIDTH[match_of(x_MH.device).kind.name] / 1e6))
        sides: dict[str, tuple[Product, Product]] = {"ours": (linear, gated_linear), "cublas": (F.linear, cublas_gated)}
        for which, (product, gated) in sides.items():
            row[f"{which}_us"] = round(graph_us(lambda: self.run(x_MH, product, gated, norms=False)))  # noqa: B023
            row[f"{which}_with_norms_us"] = round(graph_us(lambda: self.run(x_MH, product, gated, norms=True)))  # noqa: B023
        print(json.dumps(row))
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--forwards", action="store_true", help="no single shapes")
    args = parser.parse_args()
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(about))
    with torch.no_grad():
        todo = () if args.forwards else SHAPES.items()
        shapes = [row for name, shape in todo for row in time_shape(name, *shape, DTYPE, args.rows or ROWS)]
        result = about | {"shapes": shapes}
        if not (args.rows or args.forwards):
            shapes += [row for name, shape in SMALL.items() for row in time_shape(name, *shape, torch.float32, ROWS[:4])]
            result["silu_mul"] = [time_silu_mul(M) for M in PREFILL_ROWS]
        forward = Forward()
        result["forwards"] = [forward.time(M) for M in args.rows or FORWARD_ROWS]
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
