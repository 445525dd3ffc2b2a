"""Prompts of sparse latent attention over 8-bit latents: read as they are, or converted to a bf16 workspace first.

    python benchmarks latent.sparse_prompts --out benchmarks/latent/results/sparse_prompts_h200.json

A chunk of T tokens ends a text of L; each of its queries reads 2,048 keys (128 heads, latents of 512 + 64, scattered pages of
64), in parts of 910 queries as a layer does (`absorbed` in limits.py).  Milliseconds of one layer:

- direct: attention reads rows of 656 bytes (fp8_ds_mla) through the cache's slots.
- kept: a workspace is kept from the prompt's start, one for each layer: the chunk's own tokens are converted, and attention
  reads 1,152 bytes a key there.
- pass: one workspace for all layers: the whole text is converted anew, then attention reads as before.
- rest: what surrounds attention in any case: the indexer's scores and selection, and the two products with kv_b_proj.

Two selections: of random keys, and "alike", where queries agree in most of their keys, which L2 then serves.  Times are medians
of CUDA-graph replays with events.  Every way's output is compared with the direct one's, and some queries with float64.

Shapes: T queries, L tokens, I selected keys, H heads, C rank, R rotated dim, N slots, X bytes of a row.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_timing import timed
from torch import Tensor

from latent.mla import DEVICE, NOPE, SCALING, VALUE, C, H, R
from latent.sparse_latent import DIM, HEADS, TOPK
from specdec.attention.caches.fp8_latent import Fp8LatentView, quantise_latents, row_bytes
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.latent.limits import LIMITS
from specdec.attention.latent.mla import absorbed_queries, absorbed_values
from specdec.attention.latent.upconvert import upconvert
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.segment import sparse_segment

PAGE, PART, LAYERS = 64, LIMITS.absorbed // (H * (C + R)), 61  # layers of DeepSeek V3.2
LIMIT = 1e-2  # of a relative error


class Case(NamedTuple):
    L: int
    T: int
    alike: bool


CASES = [Case(L, T, alike) for L, T, alike in itertools.product((8192, 32768, 131072), (2048, 256), (False, True))]


class World:
    """One case's cache, selection and workspace."""

    layers = 1

    def __init__(self, case: Case) -> None:
        L, T, _ = self.case = case
        self.table_1W = torch.randperm(L // PAGE, device=DEVICE).int()[None]
        rows_NX = torch.cat([quantise_latents(part, C) for part in normal(L, C + R).split(65536)])
        self.cache = Fp8LatentView(rows_NX, C)
        self.memory_NL = torch.empty(L, C + R, dtype=torch.bfloat16, device=DEVICE)
        self.places_TI = chosen(case)
        self.slots_TI = PageTable(self.table_1W.expand(T, -1), PAGE).slots_at(self.places_TI.long()).int()
        self.counts_T = torch.full((T,), TOPK, dtype=torch.int32, device=DEVICE)
        self.q_THL = normal(T, H, C + R)
        self.convert(0)

    def convert(self, first: int) -> None:
        """Converts the text's tokens from `first` on; in whole pages."""
        pages = PageTable(self.table_1W[:, first // PAGE :], PAGE)
        count, start = (torch.full((1,), number, dtype=torch.int32, device=DEVICE) for number in (self.case.L - first, first))
        upconvert(self.cache, pages, count, start, self.case.L - first, self.memory_NL)

    def attend(self, view: LatentView, slots_TI: Tensor) -> list[Tensor]:
        backend, outs = TritonBackend(), []
        for start in range(0, self.case.T, PART):
            part = slice(start, min(start + PART, self.case.T))
            prepared = backend.prepare(AttentionPlan((Segment.of_slots(slots_TI[part], self.counts_T[part]),)))
            outs.append(backend.attend(self.q_THL[part], view, prepared, SCALING).out_THD)
        return [torch.cat(outs)]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def chosen(case: Case) -> Tensor:
    """[T, I] int32: each query's keys, in the order of positions."""
    L, T, alike = case
    last_T1 = torch.arange(L - T, L, device=DEVICE)[:, None]
    liked_L = torch.rand(L, device=DEVICE) * (20 if alike else 0)
    rows = []
    for last_t1 in last_T1.split(256):
        scores_tL = torch.rand(len(last_t1), L, device=DEVICE) + liked_L
        scores_tL.masked_fill_(torch.arange(L, device=DEVICE) > last_t1, -1.0)
        rows.append(scores_tL.topk(TOPK, sorted=False).indices.sort().values.int())
    return torch.cat(rows)


def direct(world: World) -> list[Tensor]:
    return world.attend(world.cache, world.slots_TI)


def kept(world: World) -> list[Tensor]:
    world.convert(world.case.L - world.case.T)
    return world.attend(MLAView(world.memory_NL, C), world.places_TI)


def by_pass(world: World) -> list[Tensor]:
    world.convert(0)
    return world.attend(MLAView(world.memory_NL, C), world.places_TI)


WAYS: dict[str, Callable[[World], list[Tensor]]] = {"direct": direct, "kept": kept, "pass": by_pass}


class Rest:
    """The work around attention in a layer."""

    layers = 1

    def __init__(self, case: Case) -> None:
        L, T, _ = case
        pages = PageTable(torch.randperm(L // PAGE, device=DEVICE).int()[None], PAGE)
        plan = AttentionPlan((causal_segment(pages, torch.full((1,), L, dtype=torch.int32, device=DEVICE), T),))
        self.candidates, self.keys_XD = CandidateKeys.of(plan, T), normal(L, DIM)
        self.q_THD, self.w_TH = normal(T, HEADS, DIM), torch.randn(T, HEADS, device=DEVICE) * HEADS**-0.5
        self.q_THN, self.out_THC, self.up_HXC = normal(T, H, NOPE), normal(T, H, C), normal(H, NOPE + VALUE, C)

    def run(self) -> list[Tensor]:
        sparse_segment(self.q_THD, self.w_TH, self.keys_XD, self.candidates, TOPK)
        outs = []
        for q_tHN, out_tHC in zip(self.q_THN.split(PART), self.out_THC.split(PART), strict=True):
            absorbed_queries(q_tHN, self.up_HXC, C + R)
            outs.append(absorbed_values(out_tHC, self.up_HXC[:, NOPE:]))
        return outs


def error(got_THD: Tensor, want_THD: Tensor) -> float:
    return float((got_THD.double() - want_THD.double()).norm() / want_THD.double().norm())


def measure(case: Case, replays: int) -> dict[str, Any]:
    world, row, outs = World(case), dict[str, Any](case._asdict()), dict[str, Tensor]()
    for name, way in WAYS.items():
        us, out_THD = timed(way, world, replays)
        row[f"{name}_ms"], outs[name] = round(us / 1e3, 4), out_THD.clone()
    some = slice(0, 4)
    segment = Segment.of_slots(world.slots_TI[some], world.counts_T[some])
    exact = TorchBackend().run(world.q_THL[some].double(), world.cache, segment, SCALING).out_THD
    row["errors"] = {name: error(out_THD[some], exact) for name, out_THD in outs.items()}
    row["from_direct"] = {name: error(outs[name], outs["direct"]) for name in ("kept", "pass")}
    row["right"] = max(*row["errors"].values(), *row["from_direct"].values()) < LIMIT
    row["rest_ms"] = round(timed(Rest.run, Rest(case), replays)[0] / 1e3, 4)
    row["workspace_MB"] = round(case.L * (C + R) * 2 / 1e6, 1)
    row["kept_for_all_layers_MB"] = round(row["workspace_MB"] * LAYERS, 1)
    row["cache_MB"] = round(case.L * row_bytes(C, R) * LAYERS / 1e6, 1)
    for name in ("kept", "pass"):
        row[f"{name}_layer_faster"] = round((row["direct_ms"] + row["rest_ms"]) / (row[f"{name}_ms"] + row["rest_ms"]), 3)
    return row


def show(r: dict[str, Any]) -> str:
    times = "".join(f"{r[f'{name}_ms']:9.3f}" for name in (*WAYS, "rest"))
    return (
        f"{r['L']:7}{r['T']:6} {'alike' if r['alike'] else 'random':7}{times}{r['kept_layer_faster']:7.3f}x"
        f"{r['pass_layer_faster']:7.3f}x {r['workspace_MB']:8.1f} {r['kept_for_all_layers_MB']:9.1f} "
        f"{'' if r['right'] else 'WRONG'} errors {', '.join(f'{name} {number:.1e}' for name, number in r['errors'].items())}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; top {TOPK}, {H} heads of {C} + {R}, ms of a layer")
    print("      L     T keys      direct     kept     pass     rest    kept    pass  MB once  MB x layers (x: of a layer)")
    rows = []
    for case in CASES:
        rows.append(measure(case, args.replays))
        print(show(rows[-1]), flush=True)
    if args.out:
        about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": importlib.metadata.version("triton"),
            "date": datetime.date.today().isoformat(), "topk": TOPK, "heads": H, "rank": C, "rope_dim": R, "page_size": PAGE,
            "layers": LAYERS, "replays": args.replays,
        }  # fmt: skip
        args.out.write_text(json.dumps({**about, "cells": rows}, indent=1) + "\n")
    return int(not all(row["right"] for row in rows))
