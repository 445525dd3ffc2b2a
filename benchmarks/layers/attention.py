"""Attention alone: prefix, tree suffix and merge of one layer, ours against flash-attn 4.  Prints a table, and writes JSON.

    python benchmarks layers.attention --out benchmarks/layers/results/attention_h100.json
    python benchmarks layers.attention --kinds --out benchmarks/layers/results/attention_kinds.json
    python benchmarks layers.attention --caches --out benchmarks/layers/results/attention_caches_h200.json

--kinds measures windowed layers (4096 as in Mistral; 128 and sinks as in gpt-oss) and 8-bit caches, beside full bf16 layers of
the same shapes.  The shape is 32/8 heads of 128, bf16, and scattered pages of 16.  Times are medians of CUDA-graph replays, per
layer.  A graph holds several layers, each with its own cache, so that a layer finds its keys in memory and not in L2, as in a
model.  The share of bandwidth counts the keys and values of the prefix that are read (a window's; 8-bit ones with their scales)
once, and neither queries, suffix, partial states nor output.

--caches measures every way to keep KV, over the same numbers, and prompts too; "int8 queries" and "int8_keys queries" stand for
these caches with int8_queries=True.  A row's error is the distance of the output from attention in float64 over the numbers as
they are stored, its rounding the distance of that from attention over the numbers themselves.

flash-attn 4 is called once for the prefix and once for the suffix (pages of one slot), and a small kernel merges their states.
Its prefix call is also timed alone.  Where flash-attn 4 is not installed, only our kernels are timed.

Shapes: B sequences, L prefix length, N tree nodes, T queries, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import platform
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from gpus import this_gpu
from graph_timing import timed
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.int8_keys import INT8_KEYS, Int8KeysLayout, Int8KeysView
from specdec.attention.caches.quant_cache import QuantView, to_fp8, to_int8
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.ops.rope import HeadPrep, Rotation, rotary_table

DEVICE = torch.device("cuda")
H, K, D, PAGE_SIZE, DEPTH = 32, 8, 128, 16, 8  # DEPTH of the trees: the suffix's width
FP8 = torch.float8_e4m3fn
TOKEN_BYTES = 2 * K * D * 2
QUERIES = " queries"  # what follows the name of a cache whose queries are rounded to int8 too
KV_BYTES = {"auto": TOKEN_BYTES, "fp8": 2 * K * D, "int8": 2 * K * (D + 4), INT8_KEYS: K * (D + 4 + 2 * D)}  # of a token
BARS_US = {(1, 1024, 6): 12.0, (1, 1024, 32): 15.0}
BARS_TBPS = {(1, 32768, 6): 2.2, (1, 32768, 32): 1.9, (32, 8192, 6): 2.6}
WINDOWED = (("decode", 1), ("chain", 6), ("tree", 6), ("tree", 32))


class Case(NamedTuple):
    """kind: tree (prefix + suffix), chain (N causal queries that are stored already), decode (a chain of one).

    window: of the layers; 128 comes with sinks.  kv: the cache's numbers.
    """

    kind: str
    B: int
    L: int
    N: int
    window: int | None = None
    kv: str = "auto"


TREES = [Case("tree", B, L, N) for B, L, N in itertools.product((1, 8, 32), (1024, 8192, 32768, 131072), (1, 6, 32, 64))]
CAUSAL = [
    Case("decode" if N == 1 else "chain", B, L, N) for N in (1, 6) for B, L in ((1, 1024), (1, 32768), (8, 1024), (32, 1024))
]
PLAIN_KINDS = [
    *(Case("tree", B, L, N) for B, L in ((1, 1024), (1, 32768), (8, 32768), (32, 8192)) for N in (6, 32)),
    *(Case(kind, B, 32768, N) for kind, N in (("decode", 1), ("chain", 6)) for B in (1, 8)),
]
KINDS = [
    *PLAIN_KINDS,
    *(case._replace(kv=kv) for kv in ("fp8", "int8") for case in PLAIN_KINDS),
    *(Case(kind, B, 32768, N, window) for window in (128, 4096) for B in (1, 8) for kind, N in WINDOWED),
    *(Case("tree", 8, 32768, N, 4096, "fp8") for N in (6, 32)),
]
LONG = 1024  # queries of a chunk of a prompt, and more
CACHES = [
    case._replace(kv=kv)
    for case in (
        *(Case(kind, B, L, N) for kind, N in WINDOWED[:2] + WINDOWED[3:] for B in (1, 8, 32) for L in (8192, 32768)),
        *(Case("chain", 1, 8192, N) for N in (LONG, 8192)),
    )
    for kv in ("auto", "fp8", "int8", "int8" + QUERIES, INT8_KEYS, INT8_KEYS + QUERIES)
]


class World:
    """One case's inputs.  pool: random bf16 numbers that every case's caches are cut from."""

    def __init__(self, case: Case, pool: Tensor, page_size: int = PAGE_SIZE) -> None:
        (kind, B, L, N), P = case[:4], page_size
        self.case, width = case, -(-(L + N) // P)
        held = width if case.window is None else -(-(case.window + N) // P) + 1  # pages that anybody reads
        numbers = B * held * P * 2 * K * D
        most = 32 if case.window is None else 160
        self.layers = min(pool.numel() // numbers, max(2, min(most, -(-100_000_000 // numbers))))  # four times L2
        shape = (self.layers, B * held * P, 2, K, D)
        self.numbers = pool[: self.layers * numbers].view(shape)[-1]  # the last layer's, as nobody has rounded them
        self.views = [cached(layer, case.kv) for layer in pool[: self.layers * numbers].view(shape)]
        self.scoring = Scoring(sinks_H=torch.randn(H, device=DEVICE)) if case.window == 128 else PLAIN
        table = torch.zeros(B, width, dtype=torch.int32, device=DEVICE)
        table[:, width - held :] = torch.randperm(B * held, device=DEVICE).view(B, held)
        lens = torch.full((B,), L, dtype=torch.int32, device=DEVICE)
        committed = L if kind == "tree" else L - N  # where this pass's tokens stand
        positions = (committed + torch.arange(N, device=DEVICE)).expand(B, N)
        self.slots_T = PageTable(table, P).slots_at(positions).flatten()
        self.qkv_TXD = torch.randn(B * N, H + 2 * K, D, device=DEVICE, dtype=torch.bfloat16)
        self.q_THD = self.qkv_TXD[:, :H].contiguous()
        rotary = rotary_table(10_000.0 ** -(torch.arange(D // 2) / (D // 2)), max(1024, B * N)).to(DEVICE, torch.bfloat16)
        self.prep = HeadPrep(Rotation(rotary, torch.arange(B * N, device=DEVICE)), K)
        if kind != "tree":
            self.plan = AttentionPlan((causal_segment(PageTable(table, P), lens, N),)).local(LayerKind(case.window))
            return
        mask = tree_mask(N)
        suffix = replace(Segment.empty(B * N, min(N, DEPTH), 1, device=DEVICE), base_B=lens)
        fill_tree_suffix(suffix, self.slots_T.view(B, N), mask.expand(B, N, N))
        positions_T = (L + mask.sum(1) - 1).repeat(B)
        plan = AttentionPlan((prefix_segment(PageTable(table, P), lens, N),), positions_T, suffix)
        self.plan = plan.local(LayerKind(case.window))


def cached(kv: Tensor, kept: str) -> MHAView | QuantView | Int8KeysView:
    """The numbers [slots, 2, K, D], stored as a cache of that kind stores them, perhaps for queries in int8."""
    kv_cache_dtype, int8_queries = kept.removesuffix(QUERIES), kept.endswith(QUERIES)
    if kv_cache_dtype == "auto":
        return MHAView(kv)
    parts = kv.split(65_536)
    if kv_cache_dtype == "fp8":
        scale_2K = torch.full((2, K), 0.02, device=DEVICE)
        return QuantView(torch.cat([to_fp8(part, scale_2K).view(torch.uint8) for part in parts]).view(FP8), scale_2K)
    if kv_cache_dtype == INT8_KEYS:
        layout = Int8KeysLayout(K, D, kv.dtype, int8_queries)
        buffers = {p.name: torch.empty(len(kv), *p.shape, dtype=p.dtype, device=DEVICE) for p in layout.buffers}
        view = layout.view(0, buffers)
        for slots_T in torch.arange(len(kv), device=DEVICE).split(65_536):
            view.write(slots_T, kv[slots_T])
        return view
    stored, scales = zip(*map(to_int8, parts), strict=True)
    return QuantView(torch.cat(stored), scales_N2K=torch.cat(scales), int8_queries=int8_queries)


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
    return [backend.attend_with_sinks(world.q_THD, view, prepared, world.scoring).out_THD for view in world.views]


def ours_with_store(world: World) -> list[Tensor]:
    """Attention and what a model launches right before it: rotary positions and the store."""
    backend = TritonBackend()
    prepared, outs = backend.prepare(world.plan), []
    for view in world.views:
        q_THD = backend.store(view, world.qkv_TXD, world.slots_T, world.prep)
        outs.append(backend.attend_with_sinks(q_THD, view, prepared, world.scoring).out_THD)
    return outs


@triton.jit
def merge_kernel(a, lse_a, b, lse_b, out, T, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """States with out [T, H, D] and lse [H, T], as flash-attn 4 leaves them.  One program a token."""
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HEADS), tl.arange(0, HEAD_DIM)
    left_H, right_H = tl.load(lse_a + h * T + token), tl.load(lse_b + h * T + token)
    at_HD = (token * HEADS + h)[:, None] * HEAD_DIM + d[None, :]
    top_H = tl.maximum(left_H, right_H)
    top_H = tl.where(top_H == -float("inf"), 0.0, top_H)
    left_H, right_H = tl.exp(left_H - top_H), tl.exp(right_H - top_H)
    total_H = left_H + right_H
    x_HD = tl.load(a + at_HD) * left_H[:, None] + tl.load(b + at_HD) * right_H[:, None]
    tl.store(out + at_HD, (x_HD / tl.where(total_H > 0, total_H, 1.0)[:, None]).to(out.dtype.element_ty))


def flash_attn_4(world: World, prefix_only: bool = False) -> list[Tensor]:
    from flash_attn.cute.interface import flash_attn_varlen_func

    def call(view: MHAView, segment: Segment) -> tuple[Tensor, Tensor]:
        pages = view.kv.view(-1, segment.pages.page_size, 2, K, D)
        return flash_attn_varlen_func(
            world.q_THD, pages[:, :, 0], pages[:, :, 1], cu_seqlens_q=segment.cu_seqlens_q, max_seqlen_q=segment.max_seqlen_q,
            seqused_k=segment.cache_seqlens, page_table=segment.pages.table, causal=segment.causal, return_lse=True,
        )[:2]  # fmt: skip

    outs = []
    for view in world.views:
        states = [call(view, segment) for segment in world.plan.parts[: 1 if prefix_only else 2]]
        if len(states) == 1:
            outs.append(states[0][0])
            continue
        (a, lse_a), (b, lse_b) = states
        out = torch.empty_like(a)
        merge_kernel[(a.shape[0],)](a, lse_a, b, lse_b, out, a.shape[0], HEADS=H, HEAD_DIM=D, num_warps=8)
        outs.append(out)
    return outs


def apart(out: Tensor, want: Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


def measure(case: Case, pool: Tensor, with_fa4: bool, replays: int) -> dict[str, Any]:
    torch.cuda.empty_cache()
    world = World(case, pool)
    us, out = timed(ours, world, replays)
    row: dict[str, Any] = {**case._asdict(), "layers": world.layers, "us": round(us, 2), **rates(case, us)}
    if case.kind != "tree":
        row["with_store_us"] = round(timed(ours_with_store, world, replays)[0], 2)
        out = timed(ours, world, 1)[1]  # of the keys as they are now
    if case.B * case.L <= 65_536 and case.N < LONG:
        want = exact(world, world.views[-1])
        row["error"] = apart(out, want)
        if case.kv != "auto" and case.kind == "tree":  # chains have stored other numbers meanwhile
            row["rounding"] = apart(want, exact(world, MHAView(world.numbers)))
    if with_fa4 and case[4:] == (None, "auto"):
        fa4_us, fa4_out = timed(flash_attn_4, world, replays)
        prefix_us = timed(partial(flash_attn_4, prefix_only=True), world, replays)[0]
        row |= {
            "fa4_prefix_us": round(prefix_us, 2),
            "fa4_us": round(fa4_us, 2),
            "fa4_TBps": rates(case, fa4_us)["TBps"],
            "apart": apart(out, fa4_out),
        }
    return row


def exact(world: World, view: MHAView | QuantView | Int8KeysView) -> Tensor:
    """Attention in float64 over the dequantised keys and values of a view."""
    oracle = TorchBackend()
    return oracle.attend_with_sinks(world.q_THD.double(), view, oracle.prepare(world.plan), world.scoring).out_THD


def rates(case: Case, us: float) -> dict[str, float]:
    read = case.B * min(case.L, case.window or case.L) * KV_BYTES[case.kv.removesuffix(QUERIES)]
    limit = read / this_gpu().read_bandwidth * 1e6
    return {"TBps": round(read / us / 1e6, 3), "share": round(limit / us, 3), "limit_us": round(limit, 2)}


def show(row: dict[str, Any]) -> str:
    case = Case(*(row[name] for name in Case._fields))
    text = f"{case.kind:6} {case.B:3} {case.L:7} {case.N:3} {case.window or '':6} {case.kv:17}"
    text += f" {row['us']:9.2f} {row['TBps']:6.2f} {row['share']:6.0%}"
    if "fa4_us" in row:
        text += f" {row['fa4_prefix_us']:9.2f} {row['fa4_us']:9.2f} {row['fa4_TBps']:6.2f}   {row['fa4_us'] / row['us']:5.2f}x"
    if "with_store_us" in row:
        text += f"   with store {row['with_store_us']:.2f} us"
    key = case[1:4] if case[4:] == (None, "auto") else ()
    if case.kind == "tree" and key in BARS_US:
        text += f"   bar {BARS_US[key]} us: {'met' if row['us'] <= BARS_US[key] else 'MISSED'}"
    if case.kind == "tree" and key in BARS_TBPS:
        text += f"   bar {BARS_TBPS[key]} TB/s: {'met' if row['TBps'] >= BARS_TBPS[key] else 'MISSED'}"
    if max(row.get("error", 0.0), row.get("apart", 0.0)) > 1e-2:
        text += f"   WRONG: {row.get('error')} {row.get('apart')}"
    return text


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pool-gb", type=float, default=36.0, help="GPU memory for caches; larger cases are skipped")
    parser.add_argument("--replays", type=int, default=21)
    parser.add_argument("--trees-only", action="store_true", help="leave out decode and chains")
    parser.add_argument("--kinds", action="store_true", help="windows and 8-bit caches, and full bf16 layers beside them")
    parser.add_argument("--caches", action="store_true", help="every way to keep KV, on the same numbers")
    args = parser.parse_args()
    installed = versions()
    print(f"{torch.cuda.get_device_name()}, {installed}")
    pool = torch.empty(int(args.pool_gb * 1e9) // 2, dtype=torch.bfloat16, device=DEVICE).normal_()
    print("kind     B       L   N window kv                      us   TB/s  share fa4prefix    fa4 us   TB/s   fa4 / ours")
    rows, skipped = [], []
    for case in CACHES if args.caches else KINDS if args.kinds else TREES if args.trees_only else CAUSAL + TREES:
        if case.B * (case.L + case.N + PAGE_SIZE) * TOKEN_BYTES > pool.numel() * 2:
            skipped.append(case._asdict())
            continue
        rows.append(measure(case, pool, installed["flash-attn-4"] is not None, args.replays))
        print(show(rows[-1]), flush=True)
    slower = [row for row in rows if row.get("fa4_us", float("inf")) < row["us"]]
    print(f"flash-attn 4 is faster in {len(slower)} of {len(rows)} cells; skipped for memory: {len(skipped)}")
    for row in slower:
        print("  ", show(row))
    print("Its prefix call alone takes less than all of ours in:")
    for row in rows:
        if row["kind"] == "tree" and row.get("fa4_prefix_us", float("inf")) < row["us"]:
            print("  ", show(row))
    if args.out:
        about = {
            "device": torch.cuda.get_device_name(), "python": platform.python_version(), "versions": installed,
            "date": datetime.date.today().isoformat(), "heads": [H, K, D], "dtype": "bfloat16", "page_size": PAGE_SIZE,
            "read_bandwidth": this_gpu().read_bandwidth, "replays": args.replays,
        }  # fmt: skip
        args.out.write_text(json.dumps({**about, "cells": rows, "skipped": skipped}, indent=1) + "\n")
    return int(any(max(row.get("error", 0.0), row.get("apart", 0.0)) > 1e-2 for row in rows))
