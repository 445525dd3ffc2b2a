#!/usr/bin/env python3
"""How long a layer's experts take with weights in 8 or 4 bits, beside bf16 ones, on a real GPU.

    python benchmarks/expert_codes.py --out benchmarks/results/expert_codes_h200.json
    python benchmarks/expert_codes.py --sweep 40       # which tiles are fastest, for so many seconds

Two layers: of gpt-oss-20b's size (32 experts, 4 a token, mxfp4) and of Qwen3-30B-A3B's (128 experts, 8 a token, fp8 blocks and
int4).  Times are medians of replays of CUDA graphs that hold many calls, each with other choices and other rows, so that
weights come from memory, as in a model.  The limit is the time to read the chosen experts' codes and scales once.

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

from specdec.models.experts import run_experts
from specdec.ops.experts.coded import CodedExperts, Form, Gate, coded_experts
from specdec.ops.experts.coded_triton import launch_coded_experts
from specdec.ops.experts.codes import StackedCodes, step_bytes, steps_of
from specdec.ops.experts.tiles import ExpertTiles
from specdec.ops.quantised.codes import Kind

BANDWIDTH = 4.48e12  # of an H200, as benchmarks/round_8b.py has it
CALLS = 12  # of a graph
ROWS = (1, 6, 32, 64, 256)


class Layer(NamedTuple):
    experts: int
    chosen: int
    hidden: int
    width: int
    gate: Gate


LAYERS = {
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, Gate(1.702, 7.0)),
    "Qwen3-30B-A3B": Layer(128, 8, 2048, 768, Gate()),
}
FORMATS: dict[str, tuple[str, Kind, int]] = {
    "mxfp4": ("gpt-oss-20b", "e2m1", 32),
    "fp8 blocks": ("Qwen3-30B-A3B", "e4m3", 128),
    "int4 g128": ("Qwen3-30B-A3B", "int4", 128),
}


def random_stack(kind: Kind, group: int, count: int, rows: int, columns: int) -> StackedCodes:
    codes = torch.randint(0, 256, (count * rows, steps_of(columns) * step_bytes(kind)), dtype=torch.uint8, device="cuda")
    if kind == "e4m3":
        codes[(codes & 127) == 127] = 1
    if kind == "e2m1":
        scales = torch.randint(116, 122, (count * rows, 4 * steps_of(columns)), dtype=torch.uint8, device="cuda")
    else:
        scales = (torch.rand(count * rows, columns // group, device="cuda") + 0.5) / (4000 if kind == "e4m3" else 100)
    return StackedCodes(kind, count, codes, scales, None, columns, group)


def random_experts(layer: Layer, kind: Kind, group: int) -> CodedExperts:
    E, H, F = layer.experts, layer.hidden, layer.width
    return CodedExperts(random_stack(kind, group, E, 2 * F, H), random_stack(kind, group, E, H, F), Form(layer.gate))


def choices(layer: Layer, T: int) -> list[Tensor]:
    """CALLS different choices [T, K], of experts that are equally likely."""
    generator = torch.Generator().manual_seed(T)
    return [torch.rand(T, layer.experts, generator=generator).topk(layer.chosen).indices.cuda() for _ in range(CALLS)]


def limit_us(stacks: tuple[StackedCodes, ...], chosen: list[Tensor]) -> float:
    each = sum(stack.codes_RJ.nbytes + stack.scales_RG.nbytes for stack in stacks) / stacks[0].matrices
    return sum(len(ids.unique()) for ids in chosen) / len(chosen) * each / BANDWIDTH * 1e6


def time_calls(call: Callable[[int], object]) -> float:
    """Microseconds of a call, which is given its number."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    return replay_us(graph, 9) / CALLS


def measure(rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """A layer's whole mixture: both products, and the weighted sum."""
    found: list[dict[str, Any]] = []

    def add(name: str, layer: Layer, T: int, us: float, limit: float) -> None:
        found.append({"format": name, "T": T, "us": round(us, 2), "limit_us": round(limit, 2)})
        print(f"{name:12} {T:4} rows {us:8.2f} us, limit {limit:8.2f}", flush=True)

    def inputs(layer: Layer, T: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        xs = [torch.randn(T, layer.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(CALLS)]
        return xs, choices(layer, T), torch.rand(T, layer.chosen, device="cuda")

    for name, (of, kind, group) in FORMATS.items():
        experts = random_experts(LAYERS[of], kind, group)
        for T in rows:
            xs, chosen, weights = inputs(LAYERS[of], T)
            us = time_calls(lambda n, xs=xs, ids=chosen, w=weights, e=experts: coded_experts(xs[n], w, ids[n], e))  # type: ignore[misc]
            add(name, LAYERS[of], T, us, limit_us((experts.gate_up, experts.down), chosen))
        del experts
    for name, layer in LAYERS.items():
        E, H, F = layer.experts, layer.hidden, layer.width
        gate_up = torch.randn(E, 2 * F, H, device="cuda", dtype=torch.bfloat16) / 50
        down = torch.randn(E, H, F, device="cuda", dtype=torch.bfloat16) / 50
        for T in rows:
            xs, chosen, weights = inputs(layer, T)
            us = time_calls(lambda n, xs=xs, ids=chosen, w=weights, g=gate_up, d=down: run_experts(xs[n], w, ids[n], g, d))  # type: ignore[misc]
            each = (gate_up.nbytes + down.nbytes) / E
            limit = sum(len(ids.unique()) for ids in chosen) / CALLS * each / BANDWIDTH * 1e6
            add(f"bf16 {name}", layer, T, us, limit)
        del gate_up, down
    return found


# ---- tiles ----


class Trial(NamedTuple):
    name: str
    gated: bool
    T: int
    tiles: ExpertTiles


def trials() -> Iterator[Trial]:
    few = itertools.product((8,), ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4)), (3, 5), (1, 2))
    more = itertools.product((8,), ((32, 2), (64, 2), (64, 4), (128, 4)), (2, 3, 4), (1, 2))
    wide = itertools.product((16,), ((64, 2), (64, 4)), (3,), (1, 2))
    forms = {1: list(few), 32: [*more, *wide]}
    for T, name, gated in itertools.product(forms, FORMATS, (True, False)):
        for block_t, (block_o, warps), stages, unroll in forms[T]:
            yield Trial(name, gated, T, ExpertTiles(block_t, block_o, warps, stages, unroll))


def product_of(trial: Trial, experts: CodedExperts, layer: Layer) -> Callable[[int], Tensor]:
    from specdec.ops.experts.coded import by_expert
    from specdec.ops.experts.tiles import MOST_READ

    chosen, P = choices(layer, trial.T), trial.T * layer.chosen
    sorts = P > MOST_READ
    found = [by_expert(ids, layer.experts) if sorts else (ids.flatten(), None) for ids in chosen]
    stack = experts.gate_up if trial.gated else experts.down
    x = torch.randn(trial.T if trial.gated else P, stack.columns, device="cuda", dtype=torch.bfloat16)
    gate = layer.gate if trial.gated else None
    return lambda n: launch_coded_experts(x, stack, None, *found[n], layer.chosen, gate, trial.tiles)


def compile_one(trial: Trial) -> tuple[str, Trial]:
    of, kind, group = FORMATS[trial.name]
    layer = LAYERS[of]._replace(experts=LAYERS[of].experts)
    try:
        with torch.no_grad():
            product_of(trial, random_experts(layer, kind, group), layer)(0)
        torch.cuda.synchronize()
    except Exception as error:  # of any kind: tiles that can't compile or launch are named, and the search goes on
        return f"{trial}: {type(error).__name__} {str(error)[:100]}", trial
    return "", trial


def sweep(seconds: float, processes: int) -> None:
    start, done = time.time(), set[Trial]()
    todo = sorted(trials(), key=lambda trial: trial.T)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap_unordered(compile_one, todo)
        try:
            for _ in todo:
                why, trial = results.next(timeout=max(0.1, 0.7 * seconds - (time.time() - start)))
                print(why, end="\n" if why else "")
                if not why:
                    done.add(trial)
        except multiprocessing.TimeoutError:
            pass
        pool.terminate()
    print(f"{len(done)} of {len(todo)} compiled in {time.time() - start:.1f} s", flush=True)
    for name, (of, kind, group) in FORMATS.items():
        layer, rows = LAYERS[of], []
        experts = random_experts(layer, kind, group)
        for trial in sorted(done, key=str):
            if trial.name == name and time.time() - start < seconds:
                rows.append((trial, time_calls(product_of(trial, experts, layer))))
        for T, gated in itertools.product((1, 32), (True, False)):
            best = sorted((us, *trial.tiles) for trial, us in rows if (trial.T, trial.gated) == (T, gated))
            stack = experts.gate_up if gated else experts.down
            limit = limit_us((stack,), choices(layer, T))
            print(
                name,
                T,
                "gated" if gated else "down",
                f"limit {limit:.2f}",
                *[(round(us, 2), *t) for us, *t in best[:8]],
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", type=float, default=0.0)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    args = parser.parse_args()
    if args.sweep:
        sweep(args.sweep, args.processes)
        return
    rows = measure(tuple(args.rows))
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                 "date": time.strftime("%Y-%m-%d"), "rows": rows}  # fmt: skip
        args.out.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
