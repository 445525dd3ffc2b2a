"""Latent attention (MLA) alone at DeepSeek-V3's shape, against what memory and tensor cores allow.  Prints and writes JSON.

    python benchmarks latent.mla --out benchmarks/latent/results/mla_h100.json
    python benchmarks latent.mla --formats --out benchmarks/latent/results/mla_fp8_h200.json

The shape is 128 heads, latents of 512 + 64, bf16, and scattered pages.  `--formats` compares a cache in 16 bits (1,152 bytes a
token) with kv_cache_dtype="fp8_ds_mla" (656 bytes), also for 16 heads, a rank's share where eight ranks hold a model.

Times are medians of CUDA-graph replays, per layer.  A graph holds several layers with caches of their own, so that a layer
finds its latents in memory and not in L2, as in a model.  The bytes are the prefix's latents, read once.  The arithmetic is
2 * (576 + 512) operations for each pair of key and query, times the heads.  With 128 heads even one query needs about as long
for its arithmetic as for its bytes, and several queries are bound by arithmetic.  Errors are distances to float64 over what the
cache holds; `quantised` is the distance to float64 over the latents before they were stored.  mla_tiles.py measures, with the
same cases, what the tiles and thresholds were chosen by.

Shapes: B sequences, L prefix length, N queries of a sequence, T = B * N, H heads, C rank, R rotated dim.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_timing import timed
from torch import Tensor

from specdec.attention.caches.fp8_latent import Fp8LatentView, quantise_latents, row_bytes
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import Scoring
from specdec.attention.latent.mla import absorbed_queries, absorbed_values, store_latent
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.ops.rope import Rotation, rotary_table

DEVICE = torch.device("cuda")
H, C, R, NOPE, VALUE = 128, 512, 64, 128, 128
DEPTH = 8  # of the trees: the suffix's width
SCALING = Scoring(scale=0.1352)
READ_BANDWIDTHS = {"H100": 3.06e12, "H200": 4.48e12}  # bytes a second, measured with large sums
PRODUCTS = 798e12  # operations a second, measured on an H100 80GB with 8192^3; an H200 reaches the same


class Case(NamedTuple):
    """kind: decode (one query), chain (N causal queries whose latents are stored), tree (prefix + suffix).

    cache: kv_cache_dtype.
    """

    kind: str
    B: int
    L: int
    N: int
    page_size: int
    cache: str = "auto"
    heads: int = H

    @property
    def token_bytes(self) -> int:
        return row_bytes(C, R) if self.cache == "fp8_ds_mla" else 2 * (C + R)


CACHES = ("auto", "fp8_ds_mla")
KINDS = (("decode", 1), ("chain", 6), ("tree", 32))
CASES = [
    Case(kind, B, L, N, P) for P, (kind, N), B, L in itertools.product((64, 16), KINDS, (1, 8, 32, 64), (1024, 8192, 32768))
]
FORMAT_CASES = [
    Case(kind, B, L, N, 64, heads=heads)
    for heads, (kind, N), B, L in itertools.product((128, 16), KINDS, (1, 8, 32), (2048, 8192, 32768))
    if kind == "decode" or (L == 8192 and B != 8)
]


class Pool:
    """Random latents that every case's caches are cut from, in bf16 and, once somebody asks for them, in 8 bits."""

    def __init__(self, tokens: int) -> None:
        self.latent_XL = torch.empty(tokens, C + R, dtype=torch.bfloat16, device=DEVICE).normal_()

    @functools.cached_property
    def rows_XB(self) -> Tensor:
        return torch.cat([quantise_latents(part, C) for part in self.latent_XL.split(100_000)])

    def views(self, cache: str, slots: int) -> list[LatentView]:
        """As many layers of so many slots as take four times L2, or as there are."""
        layers = min(len(self.latent_XL) // slots, max(1, -(-100_000_000 // (slots * (C + R)))))
        if cache == "fp8_ds_mla":
            return [Fp8LatentView(rows, C) for rows in self.rows_XB.split(slots)[:layers]]
        return [MLAView(latents, C) for latents in self.latent_XL.split(slots)[:layers]]


class World:
    """One case's inputs."""

    def __init__(self, case: Case, pool: Pool) -> None:
        kind, B, L, N, P = case[:5]
        self.case, width = case, -(-(L + N) // P)
        self.views = pool.views(case.cache, B * width * P)
        self.stored = pool.views("auto", B * width * P)[-1]  # the last layer's latents before they were stored
        self.layers = len(self.views)
        table = torch.randperm(B * width, device=DEVICE).view(B, width).int()
        lens = torch.full((B,), L, dtype=torch.int32, device=DEVICE)
        self.q_THL = torch.randn(B * N, case.heads, C + R, device=DEVICE, dtype=torch.bfloat16)
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


def error(world: World, out: Tensor, view: LatentView) -> float:
    """||out - exact|| / ||exact||, where `exact` is float64 over what the view holds."""
    oracle = TorchBackend()
    exact = oracle.attend(world.q_THL.double(), view, oracle.prepare(world.plan), SCALING).out_THD
    return float((out.double() - exact).norm() / exact.norm())


def measure(case: Case, pool: Pool, replays: int, with_error: bool = True) -> dict[str, Any]:
    world = World(case, pool)
    us, out = timed(ours, world, replays)
    limits = bound_us(case)
    row = {**case._asdict(), "layers": world.layers, "us": round(us, 2), "bytes_us": limits[0], "products_us": limits[1]}
    row |= {"TBps": round(case.B * case.L * case.token_bytes / us / 1e6, 3), "TFLOPs": round(operations(case) / us / 1e6, 1)}
    row["share"] = round(max(limits) / us, 3)
    if with_error and case.B * case.L * case.N * case.heads <= 2**28:
        row["error"] = error(world, out, world.views[-1])
        row["quantised"] = error(world, out, world.stored)
    return row


def operations(case: Case) -> float:
    return 2.0 * case.B * case.N * case.L * case.heads * (2 * C + R)


@functools.cache
def read_bandwidth() -> float:
    return next((speed for name, speed in READ_BANDWIDTHS.items() if name in torch.cuda.get_device_name()), 3.06e12)


def bound_us(case: Case) -> tuple[float, float]:
    """The least times that the bytes and the arithmetic need."""
    reading = case.B * case.L * case.token_bytes / read_bandwidth()
    return round(reading * 1e6, 2), round(operations(case) / PRODUCTS * 1e6, 2)


def show(row: dict[str, Any]) -> str:
    text = f"{row['kind']:6} P{row['page_size']:<3} {row['B']:3} {row['L']:6} {row['N']:3} {row['us']:9.2f} {row['TBps']:6.2f}"
    text += f" {row['TFLOPs']:6.0f} {row['bytes_us']:8.1f} {row['products_us']:8.1f} {row['share']:6.0%}"
    return text + (f"  error {row['error']:.1e}" if "error" in row else "")


def table(pool: Pool, replays: int) -> list[dict[str, Any]]:
    print("kind   page   B      L   N        us   TB/s TFLOPs bytes us prods us  share")
    rows = []
    for case in CASES:
        rows.append(measure(case, pool, replays))
        print(show(rows[-1]), flush=True)
    return rows


def formats(pool: Pool, replays: int) -> list[dict[str, Any]]:
    """The same cases over a cache in 16 bits and over one in 8."""
    print("heads kind     B      L   N   16 bits limits: bytes products   8 bits limits: bytes products  speed-up")
    rows = []
    for case in FORMAT_CASES:
        two = [measure(case._replace(cache=cache), pool, replays) for cache in CACHES]
        rows += two
        text = "".join(f" {row['us']:9.2f} {row['bytes_us']:13.1f} {row['products_us']:8.1f}" for row in two)
        errors = " ".join(f"{name} {row[name]:.1e}" for row in two for name in ("error", "quantised") if name in row)
        print(
            f"{case.heads:4} {case.kind:6} {case.B:3} {case.L:6} {case.N:3}{text} {two[0]['us'] / two[1]['us']:9.2f}  {errors}"
        )
    return rows


def surroundings(pool: Pool, replays: int) -> list[dict[str, Any]]:
    rows = []
    for N, B in itertools.product((1, 6, 32), (1, 32)):
        us = timed(Around(B * N), World(Case("tree", B, 1024, N, 64), pool), replays)[0]
        rows.append({"kind": "around", "B": B, "N": N, "us": round(us, 2)})
        print(f"around attention: B {B}, N {N}: {us:.1f} us a layer")
    return rows


def warm(case: Case) -> str:
    """Compiles what a case needs, in a process of its own.  Other processes find the result in the cache on disk."""
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    world = World(case, Pool(2 * (case.L + 128)))
    out = ours(world)[-1]
    return f"{case}: error {error(world, out, world.views[-1]):.1e}"


def warm_all(compile_one: Callable[[Any], str], jobs: Sequence[Any]) -> None:
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as processes:
        for line in processes.map(compile_one, jobs):
            print(line, flush=True)


def run(parts: Sequence[Callable[[Pool, int], list[dict[str, Any]]]], replays: int, out: Path | None) -> list[dict[str, Any]]:
    """Every part's rows.  They are written whenever a part is done: a later one may fail."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    pool = Pool(int(6e9) // 2 // (C + R))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows: list[dict[str, Any]] = []
    for part in parts:
        rows += part(pool, replays)
        if out:
            write(out, rows, replays)
    return rows


def write(out: Path, rows: list[dict[str, Any]], replays: int) -> None:
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": importlib.metadata.version("triton"),
        "date": datetime.date.today().isoformat(), "heads": H, "rank": C, "rope_dim": R, "dtype": "bfloat16",
        "read_bandwidth": read_bandwidth(), "products": PRODUCTS, "replays": replays,
    }  # fmt: skip
    out.write_text(json.dumps({**about, "cells": rows}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--formats", action="store_true", help="a cache in 16 bits and one in 8 instead of the table")
    args = parser.parse_args()
    small = [Case(kind, 2, 300, N, P) for kind, N in KINDS for P in (64, 16)]
    if args.formats:
        small = [Case(kind, 2, 300, N, 64, *more) for kind, N in KINDS for more in itertools.product(CACHES, (128, 16))]
    warm_all(warm, small)
    rows = run((formats,) if args.formats else (table, surroundings), args.replays, args.out)
    return int(any(row.get("error", 0.0) > 1e-2 for row in rows))
