"""How long a layer's experts take with weights in 8 or 4 bits, beside bf16 ones, on a real GPU.

    python benchmarks products.quantised_experts --out benchmarks/products/results/quantised_experts_h200.json
    python benchmarks products.quantised_experts --sweep       # with other tiles beside those that specdec takes

Two layers: of gpt-oss-20b's size (32 experts, 4 a token, mxfp4) and of Qwen3-30B-A3B's (128 experts, 8 a token, fp8 blocks and
int4).  Times are medians of replays of CUDA graphs that hold many calls, each with other choices and other rows, so that
weights come from memory, as in a model.  The limit is the time to read the chosen experts' quantised values and scales once.

Shapes: T rows, K experts of a token, E experts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from graph_timing import replay_us
from torch import Tensor

from specdec.models.mixtures.products import run_experts
from specdec.ops.products.experts import Activation, Form, QuantisedExperts, SwiGLU, quantised_experts
from specdec.ops.products.formats.experts import QuantisedStack, step_bytes, steps_of
from specdec.ops.products.formats.quantised import Kind
from specdec.ops.products.tiles.experts import ExpertTiles, expert_tiles

BANDWIDTH = 4.48e12  # of an H200, as rounds/round_8b.py has it
CALLS = 12  # of a graph


class Layer(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    width: int
    activation: Activation


LAYERS = {
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, SwiGLU(1.702, 7.0)),
    "Qwen3-30B-A3B": Layer(128, 8, 2048, 768, SwiGLU()),
}
FORMATS: dict[str, tuple[str, Kind, int]] = {
    "mxfp4": ("gpt-oss-20b", "e2m1", 32),
    "fp8 blocks": ("Qwen3-30B-A3B", "e4m3", 128),
    "int4 g128": ("Qwen3-30B-A3B", "int4", 128),
}


def random_stack(kind: Kind, group: int, count: int, rows: int, columns: int, device: str = "cuda") -> QuantisedStack:
    qvalues = torch.randint(0, 256, (count * rows, steps_of(columns) * step_bytes(kind)), dtype=torch.uint8, device=device)
    if kind == "e4m3":
        qvalues[(qvalues & 127) == 127] = 1
    if kind == "e2m1":
        scales = torch.randint(116, 122, (count * rows, 4 * steps_of(columns)), dtype=torch.uint8, device=device)
    else:
        scales = (torch.rand(count * rows, columns // group, device=device) + 0.5) / (4000 if kind == "e4m3" else 100)
    return QuantisedStack(kind, count, qvalues, scales, None, columns, group)


def random_experts(layer: Layer, kind: Kind, group: int) -> QuantisedExperts:
    E, H, F = layer.experts, layer.hidden, layer.width
    return QuantisedExperts(random_stack(kind, group, E, 2 * F, H), random_stack(kind, group, E, H, F), Form(layer.activation))


def choices(layer: Layer, T: int) -> list[Tensor]:
    """CALLS different choices [T, K], of experts that are equally likely."""
    generator = torch.Generator().manual_seed(T)
    return [torch.rand(T, layer.experts, generator=generator).topk(layer.top_k).indices.cuda() for _ in range(CALLS)]


def time_calls(call: Callable[[int], object]) -> float:
    """Microseconds of a call, which is given its number."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    return replay_us(graph, 9) / CALLS


class Trial(NamedTuple):
    """tiles: None of a layer in bf16, which torch's grouped product computes."""

    name: str
    T: int
    tiles: ExpertTiles | None


def trials(rows: list[int], sweeps: bool) -> list[Trial]:
    """By default the tiles that specdec takes."""
    found = []
    for (name, (of, _, _)), T in itertools.product(FORMATS.items(), rows):
        layer = LAYERS[of]
        own = expert_tiles(T * layer.top_k, layer.experts)
        found += [Trial(name, T, tiles) for tiles in dict.fromkeys([own, *(candidates(own, T) if sweeps else ())])]
    return found + [Trial(name, T, None) for name, T in itertools.product(LAYERS, rows)]


def candidates(own: ExpertTiles, T: int) -> Iterator[ExpertTiles]:
    forms = ((32, 2), (64, 4)) if T <= 6 else ((64, 4), (128, 4))
    for (block_n, warps), unroll in itertools.product(forms, (1, 2)):
        yield ExpertTiles(own.block_m, block_n, warps, 3, unroll)


def layer_of(trial: Trial) -> Layer:
    return LAYERS[trial.name] if trial.tiles is None else LAYERS[FORMATS[trial.name][0]]


def weights_of(name: str) -> QuantisedExperts | tuple[Tensor, Tensor]:
    """Of a format, or of a layer in bf16."""
    if name in FORMATS:
        of, kind, group = FORMATS[name]
        return random_experts(LAYERS[of], kind, group)
    E, H, F = LAYERS[name].experts, LAYERS[name].hidden, LAYERS[name].width
    shapes = (E, 2 * F, H), (E, H, F)
    first, second = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).div_(50) for shape in shapes)
    return first, second


def call_of(trial: Trial, weights: QuantisedExperts | tuple[Tensor, Tensor]) -> Callable[[int], Tensor]:
    """A layer's whole mixture: both products, and the weighted sum."""
    layer, T = layer_of(trial), trial.T
    xs = [torch.randn(T, layer.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(CALLS)]
    chosen, shares = choices(layer, T), torch.rand(T, layer.top_k, device="cuda")
    if isinstance(weights, QuantisedExperts):
        return lambda n: quantised_experts(xs[n], shares, chosen[n], weights, tiles=trial.tiles)
    gate_up, down = weights
    return lambda n: run_experts(xs[n], shares, chosen[n], gate_up, down)


def limit_us(trial: Trial, weights: QuantisedExperts | tuple[Tensor, Tensor]) -> float:
    layer = layer_of(trial)
    if isinstance(weights, QuantisedExperts):
        held = sum(stack.qweight_RJ.nbytes + stack.scales_RG.nbytes for stack in (weights.gate_up, weights.down))
    else:
        held = sum(tensor.nbytes for tensor in weights)
    read = sum(len(ids.unique()) for ids in choices(layer, trial.T)) / CALLS
    return read * held / layer.experts / BANDWIDTH * 1e6


def compile_all(todo: list[Trial]) -> None:
    """By one process, of several: what it compiles is kept for the process that measures."""
    with torch.no_grad():
        for name, own in itertools.groupby(todo, key=lambda trial: trial.name):
            weights = weights_of(name)
            for trial in own:
                call_of(trial, weights)(0)
    torch.cuda.synchronize()


def measure(todo: list[Trial]) -> list[dict[str, Any]]:
    found = []
    for name, own in itertools.groupby(todo, key=lambda trial: trial.name):
        weights = weights_of(name)
        for trial in own:
            us, limit = time_calls(call_of(trial, weights)), limit_us(trial, weights)
            found.append({**trial._asdict(), "us": round(us, 2), "limit_us": round(limit, 2)})
            print(f"{name:14} {trial.T:4} rows {us:8.2f} us, limit {limit:8.2f}", *(trial.tiles or ()), flush=True)
        del weights
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 32, 64, 256])
    args = parser.parse_args()
    todo = trials(args.rows, args.sweep)
    own = [trial for trial in todo if trial.tiles]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_all, [own[first :: args.processes] for first in range(args.processes)])
    rows = measure(todo)
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                 "date": time.strftime("%Y-%m-%d"), "rows": rows}  # fmt: skip
        args.out.write_text(json.dumps(about) + "\n")
