"""Sparse latent attention (DeepSeek V3.2) against dense latent attention of the same batch and context, at the real shape.

    python benchmarks latent.sparse_latent --out benchmarks/latent/results/sparse_latent_h200.json

The shape is 64 indexer heads of 128, 2,048 selected keys, 128 heads, latents of 512 + 64, bf16, and scattered pages of 64.
Times are medians of CUDA-graph replays, per layer; a graph holds several layers with caches of their own, so that a layer finds
its keys in memory and not in L2, as in a model.  The layers of a graph share one plan and its candidates.

A sparse layer is three parts: scores of the indexer, selection of the best keys, and attention over their latents.  Their times
are differences: of scores and selection to scores alone, and of a whole layer to scores and selection.  (Attention that is
timed alone reads the same rows again and again, from L2.)  The byte limit is the indexer's keys (256 bytes a token), read once,
and the selected latents (1,152 bytes each), read once a query.

Shapes: B sequences, L tokens, N queries of a sequence, T = B * N, X slots, I selected keys.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from graph_timing import timed
from torch import Tensor

from latent.mla import DEVICE, SCALING, C, Case, H, Pool, R, World, ours
from specdec.attention.kernels.tiles_triton import programs_at_once
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.segment import Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.launch import IndexerTiles, launch_scores
from specdec.attention.sparse.segment import sparse_segment

HEADS, DIM, TOPK = 64, 128, 2048
MIN_LAYERS = 12  # of a graph
READ_BANDWIDTH = 4.48e12  # bytes a second, measured on an H200
CASES = [Case("decode", B, L, 1, 64) for B, L in itertools.product((1, 8, 32), (8192, 32768, 131072))]
CASES += [Case(kind, 1, L, N, 64) for (kind, N), L in itertools.product((("chain", 6), ("tree", 32)), (8192, 32768, 131072))]


class SparseWorld(World):
    """A case's latents with the indexer's queries, weights and keys."""

    def __init__(self, case: Case, pool: Pool, keys: Tensor) -> None:
        super().__init__(case, pool)
        T, slots = case.B * case.N, self.views[0].latent.shape[0]
        assert slots * self.layers * DIM <= keys.numel()
        buffers = keys[: slots * self.layers * DIM].view(self.layers, slots, DIM)
        rounds = -(-MIN_LAYERS // self.layers)  # so that the start of a graph counts little
        self.views, self.keys_LXD, self.layers = self.views * rounds, [*buffers] * rounds, self.layers * rounds
        self.q_THD = torch.randn(T, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        self.w_TH = torch.randn(T, HEADS, device=DEVICE) * HEADS**-0.5
        self.candidates = CandidateKeys.of(self.plan, T)  # made once a pass, for all its layers

    def select(self, layer: int) -> Segment:
        return sparse_segment(self.q_THD, self.w_TH, self.keys_LXD[layer], self.candidates, TOPK)

    def attend(self, layer: int, segment: Segment) -> Tensor:
        return TritonBackend().run(self.q_THL, self.views[layer], segment, SCALING).out_THD


def scored(world: SparseWorld) -> list[Tensor]:
    """The scores alone."""
    T, programs = world.q_THD.shape[0], programs_at_once(DEVICE)
    return [
        launch_scores(world.q_THD, world.w_TH, keys, world.candidates, TOPK, 0, T, IndexerTiles(), programs).scores
        for keys in world.keys_LXD
    ]


def selected(world: SparseWorld) -> list[Tensor]:
    """Scores and selection."""
    for layer in range(world.layers):
        world.select(layer)
    return [torch.empty(0, device=DEVICE)]


def sparse(world: SparseWorld) -> list[Tensor]:
    """The whole of a layer."""
    return [world.attend(layer, world.select(layer)) for layer in range(world.layers)]


def measure(case: Case, pool: Pool, keys: Tensor, replays: int) -> dict[str, Any]:
    world = SparseWorld(case, pool, keys)
    row: dict[str, Any] = {**case._asdict(), "layers": world.layers}
    for name, step in (("dense", ours), ("sparse", sparse), ("scores", scored), ("select", selected)):
        row[f"{name}_us"] = round(timed(step, world, replays)[0], 2)
    row["latents_us"] = round(row["sparse_us"] - row["select_us"], 2)
    row["select_us"] = round(row["select_us"] - row["scores_us"], 2)
    T = case.B * case.N
    row["scores_bytes_us"] = round(case.B * case.L * DIM * 2 / READ_BANDWIDTH * 1e6, 2)
    row["bytes_us"] = round(row["scores_bytes_us"] + T * min(TOPK, case.L) * (C + R) * 2 / READ_BANDWIDTH * 1e6, 2)
    row["faster"] = round(row["dense_us"] / row["sparse_us"], 2)
    return row


def show(r: dict[str, Any]) -> str:
    return (
        f"{r['kind']:7}{r['B']:3}{r['L']:8}{r['N']:4}{r['dense_us']:10.1f}{r['sparse_us']:9.1f}{r['faster']:7.2f}x "
        f"{r['scores_us']:8.1f}{r['select_us']:8.1f}{r['latents_us']:8.1f}{r['bytes_us']:8.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    pool = Pool(33 * 131_072)
    keys = torch.empty(33 * 131_072 * DIM, dtype=torch.bfloat16, device=DEVICE).normal_()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {HEADS} x {DIM}, top {TOPK}, {H} heads of {C} + {R}")
    print("kind     B       L   N     dense   sparse  faster   scores  select latents   bytes  (us a layer)")
    rows = []
    for case in CASES:
        rows.append(measure(case, pool, keys, args.replays))
        print(show(rows[-1]), flush=True)
    if args.out:
        about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": importlib.metadata.version("triton"),
            "date": datetime.date.today().isoformat(), "indexer_heads": HEADS, "indexer_dim": DIM, "topk": TOPK, "heads": H,
            "rank": C, "rope_dim": R, "dtype": "bfloat16", "read_bandwidth": READ_BANDWIDTH, "replays": args.replays,
        }  # fmt: skip
        args.out.write_text(json.dumps({**about, "cells": rows}, indent=1) + "\n")
    return 0
