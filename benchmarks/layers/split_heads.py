"""One layer's attention where keys and values differ in width: heads of 192/128, and differential attention.

    python benchmarks layers.split_heads --out benchmarks/layers/results/split_heads_h200.json

Differential attention has pairs of keys and values of twice their width, all in one ordinary cache.  It is measured in three
ways over that cache: in one call (pairs as heads of width 2D), in two calls (one for each softmax, with values of width 2D),
and in four calls of width D.  The last lines of a shape are ordinary attention over the same cache, and the one call with the
difference's own kernel.  Queries that a call needs side by side are there already, and joining outputs is not counted.

Times are medians of CUDA-graph replays, per layer; a graph holds several layers, each with its own cache, so that a layer finds
its keys in memory and not in L2.  The byte limit counts the prefix's keys and values once, at the bandwidth given.

Shapes: B sequences, L prefix length, N tree nodes, H query heads, K key heads, D key dim, E value dim.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_timing import replay_us
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.split_cache import PairedView, SplitView
from specdec.attention.differential.subtract import Difference, subtract_halves
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.pages import PageTable
from specdec.attention.plan import fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment

DEVICE = torch.device("cuda")
PAGE_SIZE, L2_BYTES = 16, 60_000_000
CASES = [(1, 1024, 1), (1, 1024, 32), (1, 32768, 6), (8, 8192, 6), (32, 2048, 6)]  # B, L, N


class Heads(NamedTuple):
    name: str
    H: int
    K: int
    D: int
    E: int


WIDE = Heads("192/128", 16, 16, 192, 128)
DIFFERENTIAL = [Heads("diff 32/16 of 64", 32, 16, 64, 64), Heads("diff 32/8 of 128", 32, 8, 128, 128)]
Call = tuple[Tensor, MHAView | SplitView | PairedView]


class World:
    """One case: a plan, queries, and several layers' rows of numbers [slots, K * (D + E)]."""

    def __init__(self, heads: Heads, B: int, L: int, N: int) -> None:
        H, K, D, E = heads[1:]
        width = -(-(L + N) // PAGE_SIZE)
        slots, self.bytes = B * width * PAGE_SIZE, B * L * K * (D + E) * 2
        layers = max(2, min(24, 2 * L2_BYTES // (slots * K * (D + E) * 2)))
        self.rows = [torch.randn(slots, K * (D + E), device=DEVICE, dtype=torch.bfloat16) for _ in range(layers)]
        table = PageTable(torch.randperm(B * width, device=DEVICE).view(B, width).int(), PAGE_SIZE)
        lens = torch.full((B,), L, dtype=torch.int32, device=DEVICE)
        slots_BN = table.slots_at((L + torch.arange(N, device=DEVICE)).expand(B, N))
        mask = torch.eye(N, dtype=torch.bool, device=DEVICE)
        for n in range(1, N):
            mask[n] |= mask[(n - 1) // 2]
        suffix = replace(Segment.empty(B * N, int(mask.sum(1).max()), 1, device=DEVICE), base_B=lens)
        fill_tree_suffix(suffix, slots_BN, mask.expand(B, N, N))
        positions_T = (L + mask.sum(1) - 1).repeat(B)
        self.plan = AttentionPlan((prefix_segment(table, lens, N),), positions_T, suffix)
        self.q_THD = torch.randn(B * N, H, D, device=DEVICE, dtype=torch.bfloat16)


def layer_time(world: World, calls: Callable[[Tensor, Tensor], list[Call]], after: Callable[..., Any], replays: int) -> float:
    """Microseconds a layer.  calls: of queries and one layer's row: what is attended to.  after: is given the outputs."""
    backend = TritonBackend()

    def step() -> None:
        prepared = backend.prepare(world.plan)
        for row in world.rows:
            outs = [backend.attend(q, view, prepared) for q, view in calls(world.q_THD, row)]
            after(*(out if isinstance(out, Tensor) else out.out_THD for out in outs))

    with torch.inference_mode():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    return replay_us(graph, replays) / len(world.rows)


def nothing(*outs: Tensor) -> None:
    """What follows attention where nothing is measured that does."""


def wide_calls(q_THD: Tensor, row: Tensor) -> list[Call]:
    _, H, K, D, E = WIDE
    return [(q_THD, SplitView(row[:, : K * D].unflatten(1, (K, D)), row[:, K * D :].unflatten(1, (K, E))))]


def ways(heads: Heads) -> dict[str, Callable[[Tensor, Tensor], list[Call]]]:
    """The ways to read one layer of differential attention."""
    _, H, K, D, _ = heads
    halves = [slice(0, H // 2), slice(H // 2, H)]  # any half of the query heads will do

    def one(q_THD: Tensor, row: Tensor) -> list[Call]:
        return [(q_THD, PairedView(row.view(-1, 2, K, D)))]

    def two(q_THD: Tensor, row: Tensor) -> list[Call]:
        kv = row.view(-1, 2, K, D)
        wide = kv[:, 1].unflatten(1, (K // 2, 2)).flatten(2)
        return [(q_THD[:, half], SplitView(kv[:, 0, c::2], wide)) for c, half in enumerate(halves)]

    def four(q_THD: Tensor, row: Tensor) -> list[Call]:
        kv = row.view(-1, 2, K, D)
        keys = [(q_THD[:, half], kv[:, 0, c::2]) for c, half in enumerate(halves)]
        return [(q, SplitView(k, kv[:, 1, e::2])) for q, k in keys for e in range(2)]

    def ordinary(q_THD: Tensor, row: Tensor) -> list[Call]:
        return [(q_THD, MHAView(row.view(-1, 2, K, D)))]

    return {"1 call": one, "2 calls": two, "4 calls": four, "ordinary": ordinary}


def measure(replays: int, bandwidth: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(heads: Heads, case: tuple[int, int, int], way: str, us: float, world: World) -> None:
        limit = world.bytes / bandwidth * 1e6
        rows.append(dict(heads=heads.name, B=case[0], L=case[1], N=case[2], way=way, us=round(us, 2), limit_us=round(limit, 2)))

    for case in CASES:
        world = World(WIDE, *case)
        add(WIDE, case, "1 call", layer_time(world, wide_calls, nothing, replays), world)
        for heads in DIFFERENTIAL:
            world, K = World(heads, *case), heads.K
            difference = Difference(torch.tensor(0.3, device=DEVICE), 0.8, 1e-5)
            for way, calls in ways(heads).items():
                add(heads, case, way, layer_time(world, calls, nothing, replays), world)
            with_difference = layer_time(
                world, ways(heads)["1 call"], lambda out, K=K, d=difference: subtract_halves(out, K, d), replays
            )
            add(heads, case, "1 call and difference", with_difference, world)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replays", type=int, default=21)
    parser.add_argument("--bandwidth", type=float, default=4.48e12, help="bytes a second that the GPU can read")
    args = parser.parse_args()
    rows = measure(args.replays, args.bandwidth)
    for row in rows:
        shape = f"{row['heads']:18} {row['B']:3} {row['L']:6} {row['N']:3} {row['way']:22}"
        print(f"{shape} {row['us']:8.2f} us, limit {row['limit_us']:.2f}")
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "bandwidth": args.bandwidth}
        args.out.write_text(json.dumps({**about, "cells": rows}, indent=1) + "\n")
