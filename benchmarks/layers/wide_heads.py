"""Wide heads alone: Gemma 4's full layers (heads of 512) and windowed ones, and MiMo-V2-Flash's (keys of 192, values of 128).

    python benchmarks layers.wide_heads --out benchmarks/layers/results/wide_heads_h200.json

Microseconds of one layer's attention, split and merge included, over scattered pages of 16, bf16, under CUDA graphs: medians of
replays.  A graph holds several layers, each with its own cache, so that a layer finds its keys in memory and not in L2.
`limit_us` is the longer of two times: the keys and values that are read, once, at the GPU's bandwidth; and the products, at
its peak.  `torch_us` is torch's attention of single queries over keys and values that lie in order, without pages.

Shapes: B sequences, L prefix length, N queries of a sequence, H heads, K kv heads, D width of a key and E of a value.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from graph_timing import replay_us
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.split_cache import SplitLayout
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment

DEVICE = torch.device("cuda")
PAGE_SIZE, L2_BYTES = 16, 60_000_000
CONTEXTS = [(1, 1024), (1, 32768), (32, 1024), (32, 32768)]
QUERIES = [("single", 1), ("chain", 6), ("tree", 32)]


class Heads(NamedTuple):
    name: str
    H: int
    K: int
    D: int
    E: int
    window: int | None = None
    sinks: bool = False


LAYERS = [
    Heads("Gemma-4-31B full", 32, 4, 512, 512),
    Heads("Gemma-4-31B windowed", 32, 16, 256, 256, 1024),
    Heads("MiMo-V2-Flash full", 64, 4, 192, 128),
    Heads("MiMo-V2-Flash windowed", 64, 8, 192, 128, 128, True),
]


class World:
    """One case: a plan, queries, and several layers' rows of numbers."""

    def __init__(self, heads: Heads, kind: str, B: int, L: int, N: int) -> None:
        _, H, K, D, E, window, sinks = heads
        width = -(-(L + N) // PAGE_SIZE)
        slots, reads = B * width * PAGE_SIZE, min(L, window or L)
        self.bytes, self.flops = B * reads * K * (D + E) * 2, B * reads * N * H * (D + E) * 2
        layers = max(2 if slots * K * (D + E) < 1 << 31 else 1, min(24, 2 * L2_BYTES // self.bytes))
        self.views = [self.view(heads, slots) for _ in range(layers)]
        table = PageTable(torch.randperm(B * width, device=DEVICE).view(B, width).int(), PAGE_SIZE)
        lens = torch.full((B,), L, dtype=torch.int32, device=DEVICE)
        self.scoring = Scoring(sinks_H=torch.randn(H, device=DEVICE) if sinks else None)
        self.q_THD = torch.randn(B * N, H, D, device=DEVICE, dtype=torch.bfloat16)
        if kind != "tree":
            plan = AttentionPlan((causal_segment(table, lens, N, "queries"),))
        else:
            mask = torch.eye(N, dtype=torch.bool, device=DEVICE)
            for n in range(1, N):
                mask[n] |= mask[(n - 1) // 2]
            suffix = replace(Segment.empty(B * N, int(mask.sum(1).max()), 1, device=DEVICE), base_B=lens)
            fill_tree_suffix(suffix, table.slots_at((L + torch.arange(N, device=DEVICE)).expand(B, N)), mask.expand(B, N, N))
            positions_T = (L + mask.sum(1) - 1).repeat(B)
            plan = AttentionPlan((prefix_segment(table, lens, N, "none"),), positions_T, suffix)
        self.plan = plan.local(LayerKind(window))

    @staticmethod
    def view(heads: Heads, slots: int) -> Any:
        _, _, K, D, E, *_ = heads
        row = torch.randn(slots, K * (D + E), device=DEVICE, dtype=torch.bfloat16)
        return MHAView(row.view(-1, 2, K, D)) if D == E else SplitLayout(K, D, E, row.dtype).view(0, {"kv": row})

    def step(self) -> list[Tensor]:
        backend = TritonBackend()
        prepared = backend.prepare(self.plan)
        return [backend.attend_with_sinks(self.q_THD, view, prepared, self.scoring).out_THD for view in self.views]

    def error(self, out_THE: Tensor) -> float:
        """The distance of the last layer's output from attention in float64, as a share of it."""
        oracle = TorchBackend()
        want = oracle.attend_with_sinks(self.q_THD.double(), self.views[-1], oracle.prepare(self.plan), self.scoring).out_THD
        return float((out_THE.double() - want).norm() / want.norm())


def graph_us(step: Any, layers: int, replays: int) -> tuple[float, Tensor]:
    """Microseconds a layer, and the last layer's output."""
    with torch.inference_mode():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = step()
    return replay_us(graph, replays) / layers, outs[-1]


def torch_us(heads: Heads, B: int, L: int, replays: int) -> float:
    """torch's attention of single queries: the heads of a group are the queries of their kv head."""
    _, H, K, D, E, *_ = heads
    layers = max(1, min(24, 2 * L2_BYTES // (B * L * K * (D + E) * 2)))
    q = torch.randn(B, K, H // K, D, device=DEVICE, dtype=torch.bfloat16)
    kv = [[torch.randn(B, K, L, width, device=DEVICE, dtype=q.dtype) for width in (D, E)] for _ in range(layers)]
    return graph_us(lambda: [F.scaled_dot_product_attention(q, k, v) for k, v in kv], layers, replays)[0]


def measure(heads: Heads, kind: str, N: int, B: int, L: int, bandwidth: float, peak: float, replays: int) -> dict[str, Any]:
    torch.cuda.empty_cache()
    world = World(heads, kind, B, L, N)
    us, out = graph_us(world.step, len(world.views), replays)
    limit = max(world.bytes / bandwidth, world.flops / peak) * 1e6
    row: dict[str, Any] = dict(heads=heads.name, kind=kind, B=B, L=L, N=N, us=round(us, 2), limit_us=round(limit, 2))
    row |= dict(ratio=round(us / limit, 2), bytes_us=round(world.bytes / bandwidth * 1e6, 2))
    if B * L <= 32_768:
        row["error"] = world.error(out)
    if N == 1 and heads.window is None:
        del world, out
        torch.cuda.empty_cache()
        row["torch_us"] = round(torch_us(heads, B, L, replays), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replays", type=int, default=21)
    parser.add_argument("--only", default="", help="part of a layer's name")
    parser.add_argument("--bandwidth", type=float, default=4.48e12, help="bytes a second that the GPU can read")
    parser.add_argument("--peak", type=float, default=989e12, help="operations a second of bf16 products")
    args = parser.parse_args()
    rows = []
    for heads in LAYERS:
        for (B, L), (kind, N) in ((c, q) for c in CONTEXTS for q in QUERIES if args.only in heads.name):
            row = measure(heads, kind, N, B, L, args.bandwidth, args.peak, args.replays)
            rows.append(row)
            print(*(f"{name} {value:.4g}" if isinstance(value, float) else value for name, value in row.items()), flush=True)
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "bandwidth": args.bandwidth}
        args.out.write_text(json.dumps({**about, "peak": args.peak, "cells": rows}, indent=1) + "\n")
