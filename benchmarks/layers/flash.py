"""A flash-attn library as our backend calls it, against our kernels: the data for attention/flash/rule.py.  Writes a table and
JSON.

    python benchmarks layers.flash --library fa4 --out benchmarks/layers/results/flash_h100.json
    python benchmarks layers.flash --library fa3 --kv fp8 --out benchmarks/layers/results/flash_fp8_h200.json

The cases are those of attention.py in this folder, some between them, and prompts.  Both sides run as they do in a model: our
kernels read the rows of the tree and merge in both, and on one side flash-attn reads the prefix (or everything, where there
is no tree).  Times are of CUDA-graph replays, per layer.  `error` is the distance of each side to the oracle in float64, where
that fits into memory; `apart` is the distance between the two sides.  With --kv fp8 both read an fp8
cache, and flash-attn 3 rounds queries and softmax weights to float8; the launch that rounds the queries is part of its time.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from graph_timing import timed
from torch import Tensor

from layers import attention as cells
from layers.attention import Case, World
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.flash.backend import FlashBackend
from specdec.attention.flash.queries import float8_queries
from specdec.attention.flash.rule import AttentionShape, is_faster
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.needs import gpu_kind

BETWEEN = [
    Case("tree", B, L, N)
    for B, L, N in itertools.product((2, 4, 8, 16, 32), (1024, 8192), (16, 32, 33, 48, 64))
    if (B, N) not in itertools.product((8, 32), (32, 64))
]
PROMPTS = [
    Case("chain", B, L, L)
    for B, L in ((1, 256), (1, 512), (1, 1024), (1, 4096), (1, 8192), (1, 16384), (2, 256), (8, 256), (8, 1024), (32, 1024))
]
PROMPTS += [Case("chain", *chunk) for chunk in ((1, 8192, 512), (1, 16384, 2048), (1, 32768, 2048), (8, 4096, 256))]
FP8 = [Case("tree", B, L, N, kv="fp8") for B, L, N in itertools.product((1, 8, 32), (1024, 8192, 32768), (6, 32, 64))]
FP8 += [Case("decode", B, L, 1, kv="fp8") for B, L in ((1, 1024), (1, 32768), (8, 8192), (32, 8192))]
FP8 += [case._replace(kv="fp8") for case in PROMPTS if case.N >= 512]
ORACLE_KEYS = 16_384
SHORTEST_PROMPT = 256
WRONG = {"auto": 1e-2, "fp8": 8e-2}  # threshold of `apart` and `error`: float8 has three digits after the first
MODULES = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}


class Side:
    """One backend over all layers of a world, as in a model: the plan is prepared once."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __call__(self, world: Any) -> list[Tensor]:
        prepared = self.backend.prepare(world.plan)
        return [self.backend.attend(world.q_THD, view, prepared, world.scoring).out_THD for view in world.views]


def measure(case: Any, pool: Tensor, ours: Side, library: Side, replays: int) -> dict[str, Any]:
    torch.cuda.empty_cache()
    world = World(case, pool)
    start = time.perf_counter()
    library(world)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    us, out = timed(ours, world, replays)
    library_us, library_out = timed(library, world, replays)
    seqlen_q_packgqa = case.N * cells.H // cells.K
    prefix = world.plan.segments[0]
    name, gpu = library.backend.library, gpu_kind(prefix.cache_seqlens.device)
    is_prompt = case.kind == "chain" and case.N >= SHORTEST_PROMPT
    reads = AttentionShape(prefix.rows, cells.K, seqlen_q_packgqa, case.L if is_prompt else prefix.max_keys)
    by_rule = case.kv == "auto" and is_faster(name, gpu, reads)
    row: dict[str, Any] = {
        "kind": case.kind, "kv": case.kv, "B": case.B, "L": case.L, "N": case.N, "packed": seqlen_q_packgqa,
        "us": round(us, 2), "library_us": round(library_us, 2), "ratio": round(us / library_us, 3),
        "rule": name if by_rule else "ours",
        "first_call_s": round(first, 2), "apart": cells.apart(out, library_out),
    }  # fmt: skip
    if case.kv == "fp8":
        row["queries_us"] = round(timed(rounded_queries, world, replays)[0], 2)
    if case.B * case.L <= ORACLE_KEYS and case.N <= 64:
        oracle = TorchBackend()
        want = oracle.attend(world.q_THD.double(), world.views[-1], oracle.prepare(world.plan)).out_THD
        row["error"] = [cells.apart(out, want), cells.apart(library_out, want)]
    return row


def rounded_queries(world: Any) -> list[Tensor]:
    """The scales of the queries, rounded to float8 once a layer: the part of flash-attn 3's time that is ours."""
    prefix = world.plan.segments[0]
    asked = (world.q_THD, prefix.cu_seqlens_q, prefix.max_seqlen_q, cells.K)
    return [float8_queries(*asked).scale_RK for _ in world.views]


def show(row: dict[str, Any]) -> str:
    text = (
        f"{row['kind']:6} {row['B']:3} {row['L']:7} {row['N']:5} {row['us']:9.2f} {row['library_us']:9.2f} {row['ratio']:6.2f}"
    )
    text += f"   {row['rule']}" + (f"   first call {row['first_call_s']:.1f} s" if row["first_call_s"] > 1 else "")
    text += f"   queries {row['queries_us']}" if "queries_us" in row else ""
    return text + ("   WRONG" if is_wrong(row) else "")


def is_wrong(row: dict[str, Any]) -> bool:
    return not max(row["apart"], *row.get("error", [0])) <= WRONG[row["kv"]]


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pool-gb", type=float, default=36.0, help="GPU memory for caches; larger cases are skipped")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--library", choices=("fa2", "fa3", "fa4"), default="fa4")
    parser.add_argument("--part", choices=("all", "cells", "between", "prompts"), default="all")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto", help="fp8: cases of its own, in place of a part")
    args = parser.parse_args()
    start = time.perf_counter()
    importlib.import_module(MODULES[args.library])  # seconds, and not part of a first call
    import_s = time.perf_counter() - start
    print(f"{torch.cuda.get_device_name()}, {cells.versions()}, import of {args.library} {import_s:.1f} s")
    pool = torch.empty(int(args.pool_gb * 1e9) // 2, dtype=torch.bfloat16, device="cuda").normal_()
    ours, library, rows = Side(TritonBackend()), Side(FlashBackend(args.library)), []
    asked = {"all": cells.CAUSAL + cells.TREES + BETWEEN + PROMPTS, "cells": cells.CAUSAL + cells.TREES, "prompts": PROMPTS}
    print(f"kind     B       L     N        us    {args.library} us  ratio   the rule takes")
    for case in FP8 if args.kv == "fp8" else asked.get(args.part, BETWEEN + PROMPTS):
        if case.B * (case.L + case.N + cells.PAGE_SIZE) * 2 * cells.K * cells.D > pool.numel():
            continue
        rows.append(measure(case, pool, ours, library, args.replays))
        print(show(rows[-1]), flush=True)
    wrong = [row for row in rows if (row["ratio"] > 1.0) != (row["rule"] != "ours")]
    faster = sum(row["ratio"] > 1 for row in rows)
    print(f"{args.library} is faster in {faster} of {len(rows)}; the rule takes the slower in {len(wrong)}:")
    for row in sorted(wrong, key=lambda row: row["ratio"]):
        print("  ", show(row))
    if args.out:
        about = {
            "library": args.library, "device": torch.cuda.get_device_name(),
            "python": platform.python_version(), "versions": cells.versions(),
            "date": datetime.date.today().isoformat(), "heads": [cells.H, cells.K, cells.D], "dtype": "bfloat16",
            "kv": args.kv, "page_size": cells.PAGE_SIZE, "replays": args.replays, "import_s": round(import_s, 2),
        }  # fmt: skip
        args.out.write_text(json.dumps({**about, "cells": rows}, indent=1) + "\n")
    return int(any(is_wrong(row) for row in rows))
