"""A layer around attention over pages: paged_attention_kernel against the kernel for Hopper GPUs, where the rule takes it.

    python benchmarks layers.paged_kernels --out benchmarks/layers/results/paged_kernels_h200.json

Eight layers in one CUDA graph, each with weights and a cache of its own, chained as in a model: norm, qkv product, the store of
keys and values, attention with its merge, o product.  So a time holds what attention costs between two products, and what of it
they hide.  Both ways take turns.  Weights and keys are random; pages of 16 tokens lie scattered.

Shapes: B sequences, L tokens before the queries, N queries of a sequence, T tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from graph_timing import replay_us
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kernels import triton_backend
from specdec.attention.kernels.tiles_triton import programs_at_once
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import PLAIN
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.ops.norm import add_rms_norm
from specdec.ops.products.dense import linear
from specdec.ops.rope import HeadPrep, Rotation, rotary_table

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
PAGE_SIZE, LAYERS, HIDDEN, TURNS = 16, 8, 4096, 6


class Case(NamedTuple):
    """tree: whether the queries are a tree's nodes, else a row's last tokens (a chain, or a prompt)."""

    B: int
    L: int
    N: int
    tree: bool = False


class Heads(NamedTuple):
    H: int
    K: int
    D: int


LLAMA = Heads(32, 8, 128)
CASES = {
    LLAMA: [
        Case(1, 1100, 1), Case(1, 1100, 6), Case(1, 1100, 32, True), Case(1, 1100, 60, True), Case(8, 1100, 1),
        Case(8, 1100, 6), Case(8, 1100, 32, True), Case(16, 1100, 1), Case(16, 1100, 6), Case(32, 1100, 1), Case(32, 1100, 6),
        Case(1, 32_700, 1), Case(1, 32_700, 6), Case(1, 32_700, 32, True), Case(1, 32_700, 60, True), Case(4, 32_700, 6),
        Case(8, 8200, 1), Case(8, 8200, 6), Case(8, 8200, 32, True), Case(32, 4100, 1), Case(32, 4100, 6),
        Case(1, 1000, 128), Case(1, 0, 256), Case(1, 0, 1024), Case(8, 0, 1024), Case(1, 0, 4096), Case(1, 8000, 512),
    ],
    Heads(64, 8, 64): [Case(1, 1100, 1), Case(8, 1100, 6), Case(1, 16_000, 6)],
    Heads(32, 32, 128): [Case(8, 1100, 6), Case(1, 16_000, 6)],
    Heads(16, 8, 256): [Case(1, 1100, 6), Case(8, 1100, 6), Case(1, 16_000, 6)],
}  # fmt: skip


class World:
    """The layers' weights and caches, and what one pass reads."""

    def __init__(self, heads: Heads, case: Case) -> None:
        (H, K, D), (B, L, N, tree) = heads, case
        self.heads, self.T = heads, B * N
        width = -(-(L + N) // PAGE_SIZE)
        pages = PageTable(torch.randperm(B * width, device=DEVICE).int().view(B, width), PAGE_SIZE)
        positions_BN = (L + torch.arange(N, device=DEVICE)).expand(B, N)
        self.slots_T = pages.slots_at(positions_BN).flatten()
        lens_B = torch.full((B,), L if tree else L + N, dtype=torch.int32, device=DEVICE)
        positions_T = positions_BN.flatten()
        if tree:
            mask = torch.eye(N, dtype=torch.bool, device=DEVICE)
            for n in range(1, N):
                mask[n] |= mask[(n - 1) // 2]
            suffix = replace(Segment.empty(self.T, int(mask.sum(1).max()), 1, device=DEVICE), base_B=lens_B)
            fill_tree_suffix(suffix, self.slots_T.view(B, N), mask.expand(B, N, N))
            positions_T = (L + mask.sum(1) - 1).repeat(B)
            self.plan = AttentionPlan((prefix_segment(pages, lens_B, N, "none"),), positions_T, suffix)
        else:
            self.plan = AttentionPlan((causal_segment(pages, lens_B, N, "queries"),), positions_T)
        table = rotary_table(500_000.0 ** -(torch.arange(D // 2) / (D // 2)), L + N).to(DEVICE, DTYPE)
        self.prep = HeadPrep(Rotation(table, positions_T), K)
        self.caches = [MHAView(_random(B * width * PAGE_SIZE, 2, K, D)) for _ in range(LAYERS)]
        self.weights = [(_random((H + 2 * K) * D, HIDDEN) * 0.02, _random(HIDDEN, H * D) * 0.02) for _ in range(LAYERS)]
        self.norm_H, self.x_TH = torch.ones(HIDDEN, device=DEVICE, dtype=DTYPE), _random(self.T, HIDDEN)

    def layers(self) -> list[Tensor]:
        """Attention's output of each layer."""
        (H, K, D), backend, outs = self.heads, TritonBackend(), []
        prepared, x, delta = backend.prepare(self.plan), self.x_TH, torch.zeros_like(self.x_TH)
        for view, (qkv_weight, o_weight) in zip(self.caches, self.weights, strict=True):
            x, normed = add_rms_norm(x, delta, self.norm_H, 1e-5)
            qkv_TXD = linear(normed, qkv_weight).view(self.T, H + 2 * K, D)
            q_THD = backend.store(view, qkv_TXD, self.slots_T, self.prep)
            outs.append(backend.attend(q_THD, view, prepared).out_THD)
            delta = linear(outs[-1].view(self.T, H * D), o_weight)
        return outs


def measured(heads: Heads, case: Case, replays: int) -> dict[str, Any]:
    """Microseconds a layer with each kernel, and by how much their outputs of the first layer differ at most."""
    world = World(heads, case)
    rule = triton_backend.hopper_tiles
    graphs, firsts = [], []
    for choose in (lambda *_: None, rule):
        with mock.patch.object(triton_backend, "hopper_tiles", choose):
            firsts.append(world.layers()[0].clone())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                world.layers()
            graphs.append(graph)
    turns = [[replay_us(graph, replays) / LAYERS for graph in graphs] for _ in range(TURNS)]
    other, ours = (statistics.median(times) for times in zip(*turns, strict=True))
    view, segment = world.caches[0], world.plan.segments[0]
    q_THD = _random(world.T, heads.H, heads.D)
    tiles = rule(q_THD, view, segment, PLAIN, programs_at_once(DEVICE))
    row = {**heads._asdict(), **case._asdict(), "triton_us": other, "rule_us": ours, "taken": tiles is not None}
    return row | {"difference": (firsts[0] - firsts[1]).abs().max().item()}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for heads, cases in CASES.items():
        for case in cases:
            with torch.inference_mode():
                rows.append(measured(heads, case, args.replays))
            print(
                *(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in rows[-1].items())
            )
            torch.cuda.empty_cache()
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
