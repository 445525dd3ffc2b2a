"""What flash-attn's libraries are worth as backends: our kernels and the libraries.

    python benchmarks layers.flash_grid --libraries fa3 --out benchmarks/layers/results/flash_grid_h200.json
    python benchmarks layers.flash_grid --libraries fa2 --part trees --coarse
    python benchmarks layers.flash_grid --part order

Trees over prefixes of 1k to 128k tokens, 1 to 64 rows, 6 to 60 nodes; chains and prompts; windows; softcap; prefixes that 32
rows share.  Microseconds a layer, of CUDA-graph replays, as a model calls its backend: prefix, suffix and merge.  flash-attn 2
reads pages of 256 tokens, the others pages of 16.  `apart` is the distance to our kernels' output.  --part order asks whether
one split alone makes flash-attn 3 add up a query's keys in one order, whatever stands beside the query.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_timing import timed
from torch import Tensor

from layers import attention as cells
from layers.attention import Case, World
from layers.flash import Side
from specdec.attention.flash.backend import FlashBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import LayerKind, Scoring
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan, last_positions
from specdec.attention.shared import SharedPrefix, split_shared

PAGES = {"ours": 16, "fa2": 256, "fa3": 16, "fa4": 16}
OWN = 256  # tokens of each row after a shared prefix
WRONG = 1e-2
LENGTHS, BATCHES, NODES = (1024, 4096, 16384, 65536, 131072), (1, 8, 64), (6, 16, 60)


class Asked(NamedTuple):
    """shared: tokens that all rows begin with.  part: what the case is measured for."""

    part: str
    case: Case
    softcap: float | None = None
    shared: int = 0


TREES = [Asked("trees", Case("tree", B, L, N)) for L, B, N in itertools.product(LENGTHS, BATCHES, NODES)]
BETWEEN = [
    Asked("between", Case("tree", B, L, N)) for L, B, N in itertools.product((4096, 16384, 65536), BATCHES[:2], (24, 32, 48))
]
CHAINS = [Asked("chains", Case("chain", B, L, N)) for B, L in ((1, 16384), (8, 16384), (64, 4096)) for N in (1, 6)]
CHAINS += [Asked("chains", Case("chain", *of)) for of in ((1, 1024, 1024), (1, 8192, 8192), (8, 8192, 512), (1, 65536, 2048))]
WINDOWS = [Asked("windows", Case("chain", B, 32768, N, 4096)) for B in (1, 8, 64) for N in (1, 6)]
WINDOWS += [Asked("windows", Case("chain", *of)) for of in (
    (1, 1024, 1024, 128), (1, 8192, 8192, 128), (1, 8192, 8192, 1024), (1, 32768, 2048, 4096), (8, 32768, 512, 4096),
    (1, 32768, 2048, 128), (8, 32768, 512, 1024),
)]  # fmt: skip
SOFTCAPS = [
    Asked("softcap", case, 50.0)
    for case in (
        Case("tree", 1, 16384, 6),
        Case("tree", 8, 16384, 60),
        Case("tree", 64, 4096, 16),
        Case("chain", 1, 8192, 8192),
    )
]
SHARED = [Asked("shared", Case("chain", 32, L + OWN, N), None, L) for L in (4096, 16384, 65536) for N in (1, 6, 16)]
CELLS = TREES + BETWEEN + CHAINS + WINDOWS + SOFTCAPS + SHARED


def world_of(asked: Asked, pool: Tensor, page_size: int) -> World:
    torch.manual_seed(7)  # the same tree and queries for each page size
    world, case = World(asked.case, pool, page_size), asked.case
    if asked.softcap is not None:
        world.scoring = Scoring(softcap=asked.softcap)
    if case.kind == "tree":
        return world
    held = world.plan.segments[0]
    own = causal_segment(held.pages, held.cache_seqlens, case.N, "queries")  # as rounds build it
    at_T = last_positions(replace(own, causal=case.N > 1))
    plan = AttentionPlan((own,), at_T)
    if asked.shared:
        pages, table = asked.shared // page_size, held.pages.table
        table[:, :pages] = table[0, :pages].clone()
        shared = SharedPrefix.empty(table, case.N)
        shared.set(list(range(case.B)), table[0, :pages].tolist(), asked.shared)
        plan = AttentionPlan(split_shared(own, shared), at_T)
    world.plan = plan.local(LayerKind(case.window))
    return world


def measure(asked: Asked, pool: Tensor, libraries: list[str], replays: int) -> dict[str, Any]:
    """One case: microseconds of our kernels and of each library, and how far apart their outputs are."""
    torch.cuda.empty_cache()
    row: dict[str, Any] = {**asked.case._asdict(), "part": asked.part, "softcap": asked.softcap, "shared": asked.shared}
    world = world_of(asked, pool, PAGES["ours"])
    us, out = timed(Side(TritonBackend()), world, replays)
    row |= {"us": round(us, 2), "apart": {}}
    if asked.shared:  # each row reads the same pages for itself
        split, own = world.plan, replace(world.plan.segments[1], starts_T=None)
        world.plan = AttentionPlan((own,), split.positions_T)
        unshared_us, out = timed(Side(TritonBackend()), world, replays)
        row["unshared_us"], world.plan = round(unshared_us, 2), split
    for library in libraries:
        if PAGES[library] != PAGES["ours"]:  # the pool is cut otherwise, so compare with ours over the same pages
            world = world_of(asked, pool, PAGES[library])
            out = Side(TritonBackend())(world)[-1]
        start = time.perf_counter()
        Side(FlashBackend(library))(world)
        torch.cuda.synchronize()
        row[f"{library}_first_s"] = round(time.perf_counter() - start, 1)
        library_us, library_out = timed(Side(FlashBackend(library)), world, replays)
        row[f"{library}_us"], row["apart"][library] = round(library_us, 2), cells.apart(library_out, out)
    return row


def show(row: dict[str, Any], libraries: list[str]) -> str:
    notes = f"w{row['window']}" if row["window"] else "cap" if row["softcap"] else "shared" if row["shared"] else ""
    text = f"{row['kind']:6} {row['B']:3} {row['L']:7} {row['N']:5} {notes:7} {row['us']:9.1f}"
    for library in libraries:
        text += f" {row[f'{library}_us']:9.1f} {row['us'] / row[f'{library}_us']:5.2f}"
        text += f"  {row[f'{library}_first_s']:.0f} s" if row[f"{library}_first_s"] > 2 else ""
    text += f"  unshared {row['unshared_us']:.1f}" if "unshared_us" in row else ""
    return text + ("   WRONG" if is_wrong(row) else "")


def is_wrong(row: dict[str, Any]) -> bool:
    return not max(row["apart"].values(), default=0.0) <= WRONG


# ---- the order of sums ----


def last_query(n: int, rows: int, num_splits: int, pool: Tensor) -> Tensor:
    """[H, D + 1]: output and lse of one and the same query: the last of n in the last of so many rows, over the same keys."""
    from flash_attn_interface import flash_attn_with_kvcache

    L, P = 4133, 16
    width = -(-L // P)
    kv = pool[: (width + 1) * P * 2 * cells.K * cells.D].view(-1, P, 2, cells.K, cells.D)
    q_THD = torch.randn(512, cells.H, cells.D, generator=torch.Generator("cuda").manual_seed(3), device="cuda").bfloat16()
    table = torch.arange(width, dtype=torch.int32, device="cuda").expand(rows, -1).contiguous()
    lens = torch.tensor([17 + 31 * row for row in range(rows - 1)] + [L], dtype=torch.int32, device="cuda")
    cu_seqlens_q = torch.arange(0, rows * n + 1, n, dtype=torch.int32, device="cuda")
    out_THD, lse_HT, *_ = flash_attn_with_kvcache(
        q_THD[-n:].repeat(rows, 1, 1), kv[:, :, 0], kv[:, :, 1], cache_seqlens=lens, page_table=table, causal=n > 1,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=n, num_splits=num_splits, return_softmax_lse=True,
    )  # fmt: skip
    return torch.cat((out_THD[-1].float(), lse_HT[:, -1:]), dim=1)


def ask_order(pool: Tensor) -> dict[str, bool]:
    """Whether the same query over the same keys has the same bits in other company."""
    found = {}
    for num_splits in (0, 1):
        alone = last_query(1, 1, num_splits, pool)
        for n, rows in (
            (1, 2),
            (1, 32),
            (1, 64),
            (2, 1),
            (6, 1),
            (6, 32),
            (16, 1),
            (17, 1),
            (32, 1),
            (33, 1),
            (64, 1),
            (512, 1),
        ):
            same = torch.equal(last_query(n, rows, num_splits, pool), alone)
            found[f"num_splits={num_splits}: last of {n} queries, {rows} rows"] = same
            print(f"num_splits {num_splits}, last of {n:3} queries in {rows:2} rows: {'same bits' if same else 'OTHER BITS'}")
    return found


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pool-gb", type=float, default=36.0, help="GPU memory for caches; larger cases are skipped")
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--libraries", default="fa3", help="fa2, fa3 and fa4, with commas")
    parser.add_argument(
        "--part", choices=("all", "trees", "between", "chains", "windows", "softcap", "shared", "order"), default="all"
    )
    parser.add_argument("--coarse", action="store_true", help="every fourth case alone")
    args = parser.parse_args()
    libraries, start = args.libraries.split(","), time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, {cells.versions()}")
    pool = torch.empty(int(args.pool_gb * 1e9) // 2, dtype=torch.bfloat16, device="cuda").normal_()
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "python": platform.python_version(), "versions": cells.versions(),
        "date": datetime.date.today().isoformat(), "heads": [cells.H, cells.K, cells.D], "dtype": "bfloat16",
        "page_sizes": PAGES, "replays": args.replays,
    }  # fmt: skip
    if args.part in ("all", "order") and "fa3" in libraries:
        about["order"] = ask_order(pool)
    rows: list[dict[str, Any]] = []
    print("kind     B       L     N              ours  " + "  ".join(f"{each}  ratio" for each in libraries))
    for asked in [each for each in CELLS if args.part in ("all", each.part)][:: 4 if args.coarse else 1]:
        case = asked.case
        if case.B * (case.L + case.N + max(PAGES.values())) * cells.TOKEN_BYTES <= pool.numel() * 2 or case.window:
            rows.append(measure(asked, pool, libraries, args.replays))
            print(show(rows[-1], libraries), flush=True)
    print(f"{len(rows)} cases in {time.perf_counter() - start:.0f} s; wrong: {sum(map(is_wrong, rows))}")
    if args.out:
        args.out.write_text(json.dumps({**about, "cells": rows}, indent=1) + "\n")
    return int(any(map(is_wrong, rows)))
