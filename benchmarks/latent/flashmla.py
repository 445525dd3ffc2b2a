"""FlashMLA's calls beside our kernels at DeepSeek's shape: dense and sparse decode, sparse prefill.  Prints and writes JSON.

    PYTHONPATH=FOLDER python benchmarks latent.flashmla --out benchmarks/latent/results/flashmla_h200.json

FOLDER holds the package `flash_mla`, or vLLM's build of its operators (`_flashmla_C.abi3.so`).  The shape is 128 heads, latents
of 512 + 64, bf16, scattered pages of 64, and 2,048 keys where a query reads selected keys.

Times are medians of CUDA-graph replays, per layer.  A graph holds several layers with caches of their own, so that a layer
finds its latents in memory and not in L2, as in a model.  FlashMLA divides its work by the rows' lengths with a kernel that
runs once a pass, here before the graph.  Each side leaves outputs and lse as it computes them.  `apart` is the relative
distance of the outputs of the two sides.

FlashMLA reads selected keys from 656 bytes a token (fp8_ds_mla) with its decode kernel, and from latents in 16 bits with its
prefill kernel, which divides no query's keys over the GPU.

Shapes: B rows, L keys of each, N queries of a row, T = B * N, H heads, C rank, R rotated dim, I selected keys, X slots.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_timing import replay_us
from toolkit.attention.flashmla import library
from torch import Tensor

from specdec.attention.caches.fp8_latent import Fp8LatentView, quantise_latents, row_bytes
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment

DEVICE = torch.device("cuda")
H, C, R, P, TOPK = 128, 512, 64, 64, 2048
SCALING = Scoring(scale=0.1352)
MIN_LAYERS = 4  # of a graph, so that its start counts little
COLD_BYTES = 120_000_000  # of the layers of one graph: they do not fit L2
READ_BANDWIDTH = 4.48e12  # bytes a second, measured on an H200
PRODUCTS = 798e12  # operations a second, measured on an H100 80GB with 8192^3; an H200 reaches the same
SELECTED = ("sparse", "prompt")  # kinds of cases in which a query reads selected keys


class Case(NamedTuple):
    """kind: "decode" (causal over pages), "prefix" (a tree's pages), "sparse" (selected keys), "prompt" (the same for many
    queries)."""

    kind: str
    B: int
    L: int
    N: int

    @property
    def pairs(self) -> int:
        return self.B * self.N * (TOPK if self.kind in SELECTED else self.L)


SIZES = tuple(itertools.product((1, 8, 32), (8192, 32768, 131072)))
CASES = [Case("decode", B, L, N) for N, (B, L) in itertools.product((1, 6), SIZES)]
CASES += [Case("prefix", B, L, N) for B, L, N in ((1, 8192, 32), (1, 32768, 32), (8, 8192, 32), (32, 8192, 32))]
CASES += [Case("sparse", B, L, N) for N, (B, L) in itertools.product((1, 6), SIZES)]
CASES += [Case("prompt", 1, 32768, N) for N in (1024, 4096)]


class Pool:
    """Random latents that every case's caches are cut from, in 16 bits and in 8."""

    def __init__(self, slots: int) -> None:
        self.latent_XL = torch.empty(slots, C + R, dtype=torch.bfloat16, device=DEVICE).normal_()

    @cached_property
    def rows_XB(self) -> Tensor:
        return torch.cat([quantise_latents(part, C) for part in self.latent_XL.split(100_000)])

    def views(self, slots: int, layers: int, eight_bits: bool) -> list[LatentView]:
        """The caches of so many layers, one after the other, and from the first again where the pool ends."""
        rows = (self.rows_XB if eight_bits else self.latent_XL).split(slots)
        whole = [part for part in rows if len(part) == slots]
        parts = [whole[i % len(whole)] for i in range(layers)]
        return [Fp8LatentView(part, C) if eight_bits else MLAView(part, C) for part in parts]


class World:
    """One case's inputs.  Where the pool is smaller than the case, several rows share slots."""

    def __init__(self, case: Case, pool: Pool) -> None:
        kind, B, L, N = case
        self.case, self.pool = case, pool
        self.slots = min(B * L, len(pool.latent_XL))
        self.layers = max(MIN_LAYERS, -(-COLD_BYTES // (self.slots * row_bytes(C, R))))
        self.q_THL = torch.randn(B * N, H, C + R, device=DEVICE, dtype=torch.bfloat16)
        self.table = (torch.randperm(B * L // P, device=DEVICE) % (self.slots // P)).view(B, -1).int()
        self.lens_B = torch.full((B,), L, dtype=torch.int32, device=DEVICE)
        self.counts_T = torch.full((B * N,), TOPK, dtype=torch.int32, device=DEVICE)

    @cached_property
    def selected_TI(self) -> Tensor:
        """[T, I] int32: the slots of random keys of the row that a query belongs to."""
        _, B, L, N = self.case
        places = torch.stack([torch.randperm(L, device=DEVICE)[:TOPK] for _ in range(B * N)])
        return PageTable(self.table.repeat_interleave(N, 0), P).slots_at(places).int()

    @property
    def plan(self) -> AttentionPlan:
        if self.case.kind in SELECTED:
            return AttentionPlan((Segment.of_slots(self.selected_TI, self.counts_T),))
        build = causal_segment if self.case.kind == "decode" else prefix_segment
        return AttentionPlan((build(PageTable(self.table, P), self.lens_B, self.case.N),))

    def views(self, eight_bits: bool) -> list[LatentView]:
        return self.pool.views(self.slots, self.layers, eight_bits)


Side = Callable[[World], Callable[[], list[Tensor]]]


def ours(eight_bits: bool) -> Side:
    """Specdec's kernels over all layers; they share a plan that is prepared in the pass."""

    def side(world: World) -> Callable[[], list[Tensor]]:
        backend, plan, views = TritonBackend(), world.plan, world.views(eight_bits)

        def layers() -> list[Tensor]:
            prepared = backend.prepare(plan)
            return [backend.attend(world.q_THL, view, prepared, SCALING).out_THD for view in views]

        return layers

    return side


def dense(world: World) -> Callable[[], list[Tensor]]:
    """FlashMLA's dense decode over pages."""
    _, B, _, N = world.case
    flash_mla, (schedule, _), views = library(), library().get_mla_metadata(), world.views(False)
    q_BNHL, caches = world.q_THL.unflatten(0, (B, N)), [view.latent.unflatten(0, (-1, P))[:, :, None] for view in views]

    def layers() -> list[Tensor]:
        return [
            flash_mla.flash_mla_with_kvcache(
                q_BNHL, cache, world.table, world.lens_B, C, schedule, softmax_scale=SCALING.scale,
                causal=world.case.kind == "decode",
            )[0].flatten(0, 1)
            for cache in caches
        ]  # fmt: skip

    return layers


def sparse_decode(world: World) -> Callable[[], list[Tensor]]:
    """FlashMLA's sparse decode over rows of 656 bytes."""
    _, B, _, N = world.case
    flash_mla, (schedule, _), views = library(), library().get_mla_metadata(), world.views(True)
    q_BNHL, selected_BNI = world.q_THL.unflatten(0, (B, N)), world.selected_TI.unflatten(0, (B, N))
    caches = [view.rows.unflatten(0, (-1, P))[:, :, None] for view in views]

    def layers() -> list[Tensor]:
        return [
            flash_mla.flash_mla_with_kvcache(
                q_BNHL, cache, None, None, C, schedule, softmax_scale=SCALING.scale, is_fp8_kvcache=True, indices=selected_BNI
            )[0].flatten(0, 1)
            for cache in caches
        ]  # fmt: skip

    return layers


def sparse_prefill(world: World) -> Callable[[], list[Tensor]]:
    """FlashMLA's sparse prefill over latents in 16 bits, with the queries' counts of keys."""
    flash_mla, views, selected_T1I = library(), world.views(False), world.selected_TI[:, None]

    def layers() -> list[Tensor]:
        return [
            flash_mla.flash_mla_sparse_fwd(
                world.q_THL, view.latent[:, None], selected_T1I, SCALING.scale, topk_length=world.counts_T
            )[0]
            for view in views
        ]  # fmt: skip

    return layers


def timed(layers: Callable[[], list[Tensor]], replays: int) -> tuple[float, Tensor]:
    """Microseconds a layer under a CUDA graph, and the first layer's output."""
    count = len(layers())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for out in outs:
        out.fill_(float("nan"))
    return replay_us(graph, replays) / count, outs[0]


def measure(case: Case, pool: Pool, replays: int) -> dict[str, Any]:
    world = World(case, pool)
    sides: list[tuple[str, Side]] = [("ours", ours(False)), ("flashmla", sparse_prefill if case.kind in SELECTED else dense)]
    if case.kind == "sparse":
        sides += [("ours_8_bits", ours(True)), ("flashmla_8_bits", sparse_decode)]
    row: dict[str, Any] = {**case._asdict(), "layers": world.layers}
    outs = {}
    for name, side in sides:
        us, outs[name] = timed(side(world), replays)
        row[f"{name}_us"] = round(us, 2)
    for name in ("", "_8_bits") if case.kind == "sparse" else ("",):
        mine, other = (outs[side + name].double() for side in ("ours", "flashmla"))
        row[f"apart{name}"] = float((mine - other).norm() / mine.norm())
        row[f"faster{name}"] = round(row[f"ours{name}_us"] / row[f"flashmla{name}_us"], 2)
    tokens = case.B * case.N * TOPK if case.kind in SELECTED else case.B * case.L
    row["bytes_us"] = round(tokens * 2 * (C + R) / READ_BANDWIDTH * 1e6, 2)
    row["products_us"] = round(2.0 * case.pairs * H * (2 * C + R) / PRODUCTS * 1e6, 2)
    return row


def show(row: dict[str, Any]) -> str:
    text = f"{row['kind']:7}{row['B']:3}{row['L']:8}{row['N']:5}"
    text += "".join(f"{row[name]:10.1f}" for name in ("bytes_us", "products_us", "ours_us", "flashmla_us"))
    text += f"{row['faster']:7.2f}x {row['apart']:.1e}"
    if "ours_8_bits_us" in row:
        text += f"   8 bits:{row['ours_8_bits_us']:9.1f}{row['flashmla_8_bits_us']:9.1f}{row['faster_8_bits']:7.2f}x"
        text += f" {row['apart_8_bits']:.1e}"
    return text


def warm(cases: list[Case]) -> str:
    """Compiles what our kernels need for these cases, in a process of its own; other processes find it on disk."""
    torch.set_grad_enabled(False)
    pool = Pool(64 * 4096)
    for case in cases:
        for eight_bits in (False, True) if case.kind == "sparse" else (False,):
            ours(eight_bits)(World(case, pool))()
    torch.cuda.synchronize()
    return f"{len(cases)} cases compiled"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--processes", type=int, default=8, help="that compile at the same time")
    args = parser.parse_args()
    if library() is None:
        parser.error("needs the package flash_mla, or _flashmla_C.abi3.so, on the Python path")
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as processes:
        print(*processes.map(warm, [CASES[i :: args.processes] for i in range(args.processes)]), sep=", ", flush=True)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    pool = Pool(max(case.B * case.L for case in CASES))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us a layer; limits of 16 bits")
    print("kind     B       L    N     bytes  products      ours  flashmla  faster  apart")
    rows = []
    for case in CASES:
        rows.append(measure(case, pool, args.replays))
        print(show(rows[-1]), flush=True)
    if args.out:
        about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": importlib.metadata.version("triton"),
            "date": datetime.date.today().isoformat(), "heads": H, "rank": C, "rope_dim": R, "page_size": P, "topk": TOPK,
            "dtype": "bfloat16", "read_bandwidth": READ_BANDWIDTH, "products": PRODUCTS, "replays": args.replays,
        }  # fmt: skip
        args.out.write_text(json.dumps({**about, "cells": rows}, indent=1) + "\n")
    return int(any(row["apart"] > 2e-2 for row in rows))
