#!/usr/bin/env python3
"""Latent attention (MLA) alone at DeepSeek-V3's shape, against what memory and tensor cores allow.  Prints and writes JSON.

    python benchmarks/mla.py --out benchmarks/results/mla_h100.json

The shape is 128 heads, latents of 512 + 64, bf16, and scattered pages.  Times are medians of CUDA-graph replays, per layer.  A
graph holds several layers with caches of their own, so that a layer finds its latents in memory and not in L2, as in a model.
The bytes are the prefix's latents, read once.  The arithmetic is 2 * (576 + 512) operations for each pair of key and query,
times the heads.  With 128 heads even one query needs about as long for its arithmetic as for its bytes, and several queries are
bound by arithmetic.  Errors are distances to float64.

Shapes: B sequences, L prefix length, N queries of a sequence, T = B * N, H heads, C rank, R rotated dim.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.mla_cache import LatentLayout, MLAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import FULL, Scoring
from specdec.attention.latent import mla, mla_launch
from specdec.attention.latent.mla import LatentInputs, absorbed_queries, absorbed_values, store_latent
from specdec.attention.latent.mla_launch import LatentTiles
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.ops.rope import Rotation, rotary_table

DEVICE = torch.device("cuda")
H, C, R, NOPE, VALUE = 128, 512, 64, 128, 128
DEPTH = 8  # of the trees: the suffix's width
SCALING = Scoring(scale=0.1352)
READ_BANDWIDTH, PRODUCTS = 3.06e12, 798e12  # bytes and operations a second, measured on an H100 80GB: large sums, 8192^3


class Case(NamedTuple):
    """kind: decode (one query), chain (N causal queries whose latents are stored), tree (prefix + suffix)."""

    kind: str
    B: int
    L: int
    N: int
    page_size: int


KINDS = (("decode", 1), ("chain", 6), ("tree", 32))
CASES = [
    Case(kind, B, L, N, P) for P, (kind, N), B, L in itertools.product((64, 16), KINDS, (1, 8, 32, 64), (1024, 8192, 32768))
]
TRIED = [
    LatentTiles(64, 64, 8, 2, 256, hopper=True),
    LatentTiles(64, 64, 8, 2, 256),
    LatentTiles(64, 32, 8, 2, 256),
    LatentTiles(64, 32, 8, 3, 256),
]


class World:
    """One case's inputs.  pool: random bf16 numbers that every case's caches are cut from."""

    def __init__(self, case: Case, pool: Tensor) -> None:
        kind, B, L, N, P = case
        self.case, width = case, -(-(L + N) // P)
        numbers = B * width * P * (C + R)
        self.layers = min(pool.numel() // numbers, max(1, -(-100_000_000 // numbers)))  # four times L2
        latents = pool[: self.layers * numbers].view(self.layers, -1, C + R)
        self.views = [MLAView(layer, C) for layer in latents]
        table = torch.randperm(B * width, device=DEVICE).view(B, width).int()
        lens = torch.full((B,), L, dtype=torch.int32, device=DEVICE)
        self.q_THL = torch.randn(B * N, H, C + R, device=DEVICE, dtype=torch.bfloat16)
        committed = L if kind == "tree" else L - N
        self.slots_T = PageTable(table, P).slots_at((committed + torch.arange(N, device=DEVICE)).expand(B, N)).flatten()
        if kind != "tree":
            self.plan = AttentionPlan((causal_segment(PageTable(table, P), lens, N),))
            return
        suffix = Segment.empty(B * N, min(N, DEPTH), 1, device=DEVICE)
        fill_tree_suffix(suffix, self.slots_T.view(B, N), tree_mask(N).expand(B, N, N))
        self.plan = AttentionPlan((prefix_segment(PageTable(table, P), lens, N),), suffix=suffix)


def tree_mask(N: int) -> Tensor:
    """[N, N]: a random tree at most DEPTH deep."""
    mask = torch.eye(N, dtype=torch.bool)
    for n in range(1, N):
        shallow = [p for p in range(n) if mask[p].sum() < DEPTH]
        mask[n] |= mask[shallow[int(torch.randint(len(shallow), ()))]]
    return mask.to(DEVICE)


def ours(world: World) -> list[Tensor]:
    """Every layer's attention.  The layers share one prepared plan, as in a model."""
    backend = TritonBackend()
    prepared = backend.prepare(world.plan)
    return [backend.attend(world.q_THL, view, prepared, SCALING).out_THD for view in world.views]


class Around:
    """The work around attention in a layer: rotating and storing, queries into latents, and values out of latents."""

    def __init__(self, T: int) -> None:
        shapes = (T, H, NOPE + R), (T, C + R), (H, NOPE + VALUE, C)
        self.q, self.fresh, self.up = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes)
        table = rotary_table(10_000.0 ** -(torch.arange(R // 2) / (R // 2)), 64).to(DEVICE, torch.bfloat16)
        self.prep = LatentPrep(Rotation(table, torch.arange(T, device=DEVICE) % 64), self.up[0, 0], 1e-6)

    def __call__(self, world: World) -> list[Tensor]:
        outs = []
        for view in world.views:
            q_THL = absorbed_queries(self.q[..., :NOPE], self.up, C + R)
            store_latent(view, self.q[..., NOPE:], self.fresh, world.slots_T, self.prep, q_THL[..., C:])
            outs.append(absorbed_values(world.q_THL[..., :C], self.up[:, NOPE:]))
        return outs


class Prompt:
    """T tokens of one prompt after `cached` others, through a whole layer's attention without its projections."""

    layers = 1

    def __init__(self, T: int, cached: int) -> None:
        pages = -(-(T + cached) // 64)
        self.table = torch.randperm(pages, device=DEVICE).view(1, pages).int()
        self.positions_T = cached + torch.arange(T, device=DEVICE)
        self.cache = KVCache(LatentLayout(C, R, torch.bfloat16), [FULL], pages * 64, device=DEVICE)
        self.cache.planes["latent"].normal_()
        length_1 = torch.tensor([T + cached], dtype=torch.int32, device=DEVICE)
        segment = replace(causal_segment(PageTable(self.table, 64), length_1, T), max_cached=cached)
        self.plan = AttentionPlan((segment,))
        self.around = Around(T)

    def __call__(self, _: object) -> list[Tensor]:
        slots_T, around = PageTable(self.table, 64).slots_at(self.positions_T[None])[0], self.around
        attn = PagedAttention(TritonBackend(), self.cache, PassTables(self.plan, slots_T))
        return [attn(0, LatentInputs(around.q, around.fresh, around.up, around.prep), None, SCALING)]


def prompts(_: Tensor, replays: int) -> list[dict[str, Any]]:
    """Absorbed against expanded attention, which shows from how many tokens on expanding is faster (EXPAND_ABOVE)."""
    rows = []
    for T, cached in itertools.product((256, 512, 1024, 2048, 4096, 8192), (0, 8192)):
        row: dict[str, Any] = {"kind": "prompt", "T": T, "cached": cached}
        for name, above in (("absorbed_us", 1 << 30), ("expanded_us", 0)):
            mla.EXPAND_ABOVE = above
            step = Prompt(T, cached)
            row[name] = round(timed(step, step, replays)[0], 1)
        rows.append(row)
        print(f"prompt of {T:5} after {cached:5}: absorbed {row['absorbed_us']:9.1f} us, expanded {row['expanded_us']:9.1f} us")
    return rows


def timed(step: Callable[[Any], list[Tensor]], world: World | Prompt, replays: int) -> tuple[float, Tensor]:
    """Microseconds a layer under a CUDA graph, and the last layer's output."""
    step(world)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step(world)
    for out in outs:
        out.fill_(float("nan"))
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:]) / world.layers, outs[-1]


def error(world: World, out: Tensor) -> float:
    """||out - exact|| / ||exact||."""
    oracle = TorchBackend()
    view = MLAView(world.views[-1].latent.double(), C)
    exact = oracle.attend(world.q_THL.double(), view, oracle.prepare(world.plan), SCALING).out_THD
    return float((out.double() - exact).norm() / exact.norm())


def measure(case: Case, pool: Tensor, replays: int, with_error: bool = True) -> dict[str, Any]:
    world = World(case, pool)
    us, out = timed(ours, world, replays)
    limits = bound_us(case)
    row = {**case._asdict(), "layers": world.layers, "us": round(us, 2), "bytes_us": limits[0], "products_us": limits[1]}
    row |= {"TBps": round(case.B * case.L * (C + R) * 2 / us / 1e6, 3), "TFLOPs": round(operations(case) / us / 1e6, 1)}
    row["share"] = round(max(limits) / us, 3)
    if with_error and case.B * case.L * case.N * H <= 2**28:
        row["error"] = error(world, out)
    return row


def operations(case: Case) -> float:
    return 2.0 * case.B * case.N * case.L * H * (2 * C + R)


def bound_us(case: Case) -> tuple[float, float]:
    """The least times that the bytes and the arithmetic need."""
    reading = case.B * case.L * (C + R) * 2 / READ_BANDWIDTH
    return round(reading * 1e6, 2), round(operations(case) / PRODUCTS * 1e6, 2)


def show(row: dict[str, Any]) -> str:
    text = f"{row['kind']:6} P{row['page_size']:<3} {row['B']:3} {row['L']:6} {row['N']:3} {row['us']:9.2f} {row['TBps']:6.2f}"
    text += f" {row['TFLOPs']:6.0f} {row['bytes_us']:8.1f} {row['products_us']:8.1f} {row['share']:6.0%}"
    return text + (f"  error {row['error']:.1e}" if "error" in row else "")


def use(tiles: LatentTiles) -> None:
    mla_launch.latent_tiles = lambda *_: tiles


def warm(job: tuple[LatentTiles | None, Case]) -> str:
    """Compiles what a case needs, in a process of its own.  Other processes find the result in the cache on disk."""
    tiles, case = job
    torch.set_grad_enabled(False)
    if tiles is not None:
        use(tiles)
    try:
        torch.manual_seed(0)
        pool = torch.empty(2 * (case.L + 128) * (C + R), dtype=torch.bfloat16, device=DEVICE).normal_()
        world = World(case, pool)
        out = ours(world)[-1]
        return f"{job}: error {error(world, out):.1e}"
    except Exception as reason:  # a tile that does not fit is no reason to stop
        return f"{job}: {type(reason).__name__} {str(reason)[:200]}"


def tune(pool: Tensor, replays: int) -> list[dict[str, Any]]:
    """Every tile that compiles, over cases of each kind."""
    rows = []
    sizes = ((1, 8192), (1, 32768), (8, 8192), (32, 8192))
    cases = [Case(kind, B, L, N, 64) for (kind, N), (B, L) in itertools.product(KINDS, sizes)]
    cases.append(Case("tree", 32, 8192, 32, 16))
    for tiles in TRIED:
        use(tiles)
        for case in cases:
            try:
                row = {**tiles._asdict(), **measure(case, pool, replays, False)}
            except Exception as reason:  # likewise; the row says why
                row = {**tiles._asdict(), **case._asdict(), "failed": str(reason)[:200]}
            rows.append(row)
        done = [row for row in rows[-len(cases) :] if "us" in row]
        print(tuple(tiles))
        for r in done:
            print("   ", show(r))
    return rows


def table(pool: Tensor, replays: int) -> list[dict[str, Any]]:
    print("kind   page   B      L   N        us   TB/s TFLOPs bytes us prods us  share")
    rows = []
    for case in CASES:
        rows.append(measure(case, pool, replays))
        print(show(rows[-1]), flush=True)
    return rows


def surroundings(pool: Tensor, replays: int) -> list[dict[str, Any]]:
    rows = []
    for N, B in itertools.product((1, 6, 32), (1, 32)):
        us = timed(Around(B * N), World(Case("tree", B, 1024, N, 64), pool), replays)[0]
        rows.append({"kind": "around", "B": B, "N": N, "us": round(us, 2)})
        print(f"around attention: B {B}, N {N}: {us:.1f} us a layer")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--tune", action="store_true", help="try tiles instead of the table")
    args = parser.parse_args()
    small = [Case(kind, 2, 300, N, P) for kind, N in KINDS for P in (64, 16)]
    jobs = list(itertools.product(TRIED if args.tune else [None], small))
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool_of_processes:
        for line in pool_of_processes.map(warm, jobs):
            print(line, flush=True)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    pool = torch.empty(int(6e9) // 2, dtype=torch.bfloat16, device=DEVICE).normal_()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    parts = (tune,) if args.tune else (table, surroundings, prompts)
    rows: list[dict[str, Any]] = []
    for part in parts:  # each is written when it is done: a later one may fail
        rows += part(pool, args.replays)
        if args.out:
            write(args.out, rows, args.replays)
    return int(any(row.get("error", 0.0) > 1e-2 for row in rows))


def write(out: Path, rows: list[dict[str, Any]], replays: int) -> None:
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": importlib.metadata.version("triton"),
        "date": datetime.date.today().isoformat(), "heads": H, "rank": C, "rope_dim": R, "dtype": "bfloat16",
        "read_bandwidth": READ_BANDWIDTH, "products": PRODUCTS, "replays": replays,
    }  # fmt: skip
    out.write_text(json.dumps({**about, "cells": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
