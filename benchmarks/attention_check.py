"""The Triton backend on a real GPU: held against float64 in bf16, fp16 and fp32, then timed.  Prints, and writes JSON.

    python benchmarks/attention_check.py --out attention.json [--sweep 100]

Times are medians of CUDA-graph replays, per layer.  A graph holds many layers, each with its own cache, so that a layer
finds its keys in memory and not in L2, as in a model.  --sweep also times tile sizes and launch settings side by side.

Shapes: B sequences, L prefix length, N tree nodes, T queries, H heads, K kv heads, D head dim, W suffix width.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.attention import triton_backend
from specdec.attention.kv_cache import KVView
from specdec.attention.plan import (
    causal_segment,
    fill_tree_suffix,
    prefix_segment,
    ragged_causal_segment,
    slots_at,
)
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.torch_backend import TorchBackend
from specdec.attention.triton_backend import Tiles, TritonBackend

DEVICE = torch.device("cuda")
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm(out - ref) / norm(ref)
DEPTH = 8  # of the trees: suffix width


class Heads(NamedTuple):
    H: int
    K: int
    D: int


LLAMA = Heads(32, 8, 128)


class Case(NamedTuple):
    """kind: tree, chain (N causal queries), decode, prompts (L tokens each, N ignored); capacity: the table's, if more."""

    kind: str
    B: int
    L: int
    N: int
    page_size: int = 16
    capacity: int = 0

    @property
    def queries(self) -> int:
        return self.B * {"tree": self.N, "chain": self.N, "decode": 1, "prompts": self.L}[self.kind]

    @property
    def name(self) -> str:
        return (
            f"{self.kind} B={self.B} L={self.L}"
            + (f" N={self.N}" if self.kind in ("tree", "chain") else "")
            + (f" of {self.capacity}" if self.capacity else "")
        )


def make_plan(case: Case) -> tuple[AttentionPlan, int]:
    """The plan, and how many slots its cache needs.  Pages lie scattered."""
    kind, B, L, N, P, capacity = case
    width = -(-(L + N) // P)
    table = torch.randperm(B * width, device=DEVICE).view(B, width).int()
    if capacity:
        table = torch.nn.functional.pad(table, (0, capacity // P - width))
    lens = torch.full((B,), L, dtype=torch.int32, device=DEVICE)
    if kind == "prompts":
        return AttentionPlan((ragged_causal_segment(table, [L] * B, [L] * B, P),)), B * width * P
    if kind in ("chain", "decode"):
        return AttentionPlan((causal_segment(table, lens, N if kind == "chain" else 1, P),)), B * width * P
    suffix = Segment.empty(B * N, min(N, DEPTH), 1, device=DEVICE)
    positions = (lens[:, None] + torch.arange(N, device=DEVICE)).long()
    fill_tree_suffix(suffix, slots_at(table, positions, P), tree_mask(N).expand(B, N, N))
    return AttentionPlan((prefix_segment(table, lens, N, P), suffix)), B * width * P


def tree_mask(N: int) -> Tensor:
    """[N, N]: a random tree at most DEPTH deep."""
    mask = torch.eye(N, dtype=torch.bool)
    for n in range(1, N):
        shallow = [p for p in range(n) if mask[p].sum() < DEPTH]
        mask[n] |= mask[shallow[int(torch.randint(len(shallow), ()))]]
    return mask.to(DEVICE)


def check(case: Case, heads: Heads, dtype: torch.dtype) -> dict[str, Any]:
    plan, slots = make_plan(case)
    view = KVView(torch.randn(slots, 2, heads.K, heads.D, device=DEVICE, dtype=dtype))
    q_THD = torch.randn(case.queries, heads.H, heads.D, device=DEVICE, dtype=dtype)
    backend, oracle = TritonBackend(), TorchBackend()
    out = backend.attend(q_THD, view, backend.prepare(plan)).double()
    ref = oracle.attend(q_THD.double(), KVView(view.kv.double()), oracle.prepare(plan))
    error = float((out - ref).norm() / ref.norm())
    name = f"{case.name} page={case.page_size} heads={heads.H}/{heads.K}x{heads.D} {str(dtype)[6:]}"
    return {"case": name, "error": error, "ok": error < BOUNDS[dtype]}


def check_all() -> list[dict[str, Any]]:
    cases = [
        Case("tree", 1, 1000, 6), Case("tree", 1, 32_771, 32), Case("tree", 9, 700, 60, 1), Case("tree", 2, 0, 6),
        Case("chain", 3, 5000, 6, 64), Case("decode", 1, 20_000, 1), Case("decode", 40, 300, 1, 4),
        Case("prompts", 3, 777, 0), Case("prompts", 1, 2000, 0, 256),
    ]  # fmt: skip
    small = [Case("tree", 3, 500, 7, 4), Case("chain", 2, 130, 5, 4), Case("prompts", 2, 100, 0)]
    odd = [Heads(8, 8, 64), Heads(6, 2, 24), Heads(8, 1, 80), Heads(8, 4, 8), Heads(4, 2, 256)]
    todo = [*itertools.product(cases, [LLAMA]), *itertools.product(small, odd)]
    return [check(case, heads, dtype) for case, heads in todo for dtype in BOUNDS]


def median_us(step: Callable[[], None], replays: int = 40) -> float:
    """Microseconds of one replay of `step`, captured."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(torch.tensor(times).median())


class Bench:
    """One case's inputs, with as many layers of cache as spill over L2 four times (at most 32)."""

    def __init__(self, case: Case, heads: Heads = LLAMA, dtype: torch.dtype = torch.bfloat16) -> None:
        self.case, self.heads = case, heads
        self.plan, slots = make_plan(case)
        layer_bytes = slots * 2 * heads.K * heads.D * dtype.itemsize
        self.layers = max(2, min(32, -(-4 * 50_000_000 // layer_bytes)))
        kv = torch.randn(self.layers, slots, 2, heads.K, heads.D, device=DEVICE, dtype=dtype)
        self.views = [KVView(layer) for layer in kv]
        self.q_THD = torch.randn(case.queries, heads.H, heads.D, device=DEVICE, dtype=dtype)
        self.read_bytes = case.B * case.L * 2 * heads.K * heads.D * dtype.itemsize

    def time(self, programs: int | None = None) -> dict[str, Any]:
        backend = TritonBackend(programs)

        def step() -> None:
            prepared = backend.prepare(self.plan)
            for view in self.views:
                backend.attend(self.q_THD, view, prepared)

        us = median_us(step) / self.layers
        row = {"case": self.case.name, "us": round(us, 2), "TB/s": round(self.read_bytes / us / 1e6, 3)}
        if self.case.kind == "prompts":
            flops = 2 * self.case.B * self.case.L**2 * self.heads.H * self.heads.D
            row["TFLOP/s"] = round(flops / us / 1e6, 1)
        return row

    def time_store(self) -> dict[str, Any]:
        T = self.q_THD.shape[0]
        kv_T2KD = torch.randn(T, 2, self.heads.K, self.heads.D, device=DEVICE, dtype=self.q_THD.dtype)
        slots_T = torch.randperm(self.views[0].kv.shape[0], device=DEVICE)[:T]
        backend = TritonBackend()
        us = median_us(lambda: [backend.store(view, kv_T2KD, slots_T) for view in self.views]) / self.layers
        return {"case": f"store T={T}", "us": round(us, 2)}


TREES = [Case("tree", B, L, N) for B, L, N in [
    (1, 1024, 6), (1, 1024, 32), (1, 1024, 60), (1, 8192, 6), (1, 8192, 32), (1, 32_768, 6), (1, 32_768, 32),
    (1, 32_768, 60), (8, 1024, 6), (8, 1024, 32), (32, 1024, 6), (32, 1024, 32), (32, 8192, 6),
]]  # fmt: skip
TREES += [Case("tree", 1, 1024, N, capacity=32_768) for N in (6, 32)]
OTHERS = [
    Case("decode", 1, 1024, 1), Case("decode", 1, 32_768, 1), Case("decode", 32, 1024, 1), Case("decode", 32, 8192, 1),
    Case("chain", 1, 1024, 6), Case("chain", 8, 1024, 6), Case("chain", 32, 1024, 6), Case("prompts", 1, 1024, 0),
    Case("prompts", 1, 8192, 0), Case("prompts", 8, 1024, 0),
]  # fmt: skip
STORES = [Case("tree", 1, 1024, 6), Case("prompts", 1, 4096, 0)]

Setting = tuple[Tiles | None, int | None, int | None, bool]


def settings(case: Case) -> Iterator[Setting]:
    """(tiles, programs, merge chunk, programmatic launch) to try; None: what the policy takes."""
    yield None, None, None, True
    yield None, None, None, False
    if case.kind == "tree":
        yield from ((None, None, chunk, True) for chunk in (1, 2, 4, 8))
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    packed = {"tree": case.N * 4, "chain": case.N * 4, "prompts": 4096, "decode": 4}[case.kind]
    small = [(32, 64, 4, 5), (32, 128, 4, 3), (32, 32, 4, 7)]
    large = [(64, 64, 4, 5), (64, 64, 4, 3), (64, 128, 4, 5), (128, 64, 8, 5), (128, 128, 8, 5)]
    for (block_m, *rest), programs in itertools.product(small if packed < 64 else large, (sms, 2 * sms)):
        wanted = max(16, 1 << (packed - 1).bit_length())
        yield Tiles(min(wanted, block_m), *rest), programs, None, True


def sweep(cases: list[Case], seconds: float) -> list[dict[str, Any]]:
    rows, kept = [], (triton_backend.tiles_for, triton_backend.chunk_for, triton_backend.has_pdl)
    end = time.monotonic() + seconds
    for case in cases:
        if time.monotonic() > end:
            break
        bench = Bench(case)
        for tiles, programs, chunk, pdl in settings(case):
            triton_backend.tiles_for = (lambda *_, t=tiles: t) if tiles else kept[0]
            triton_backend.chunk_for = (lambda *_, c=chunk: c) if chunk else kept[1]
            triton_backend.has_pdl = lambda _, p=pdl: p
            setting = f"tiles={tiles and tuple(tiles)} programs={programs} chunk={chunk} pdl={pdl}"
            try:
                rows.append({**bench.time(programs), "setting": setting})
            except Exception as error:  # a tile too large for the machine is a result here
                rows.append({"case": case.name, "us": float("inf"), "setting": f"{setting}: {type(error).__name__}"})
    triton_backend.tiles_for, triton_backend.chunk_for, triton_backend.has_pdl = kept
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", type=float, default=0, metavar="SECONDS", help="try settings for so long")
    parser.add_argument("--only", default="", metavar="TEXT", help="time and sweep the cases with this in their names")
    args = parser.parse_args()
    torch.manual_seed(args_seed := int(time.time()))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {args_seed}")
    checks = check_all()
    bad = [row for row in checks if not row["ok"]]
    for row in sorted(checks, key=lambda r: -r["error"])[:5] + bad:
        print(f"{'ok ' if row['ok'] else 'BAD'} {row['error']:.2e}  {row['case']}")
    print(f"{len(checks) - len(bad)} of {len(checks)} within their bounds")
    cases = [case for case in (*TREES, *OTHERS) if args.only in case.name]
    times = [Bench(case).time() for case in cases] + [Bench(case).time_store() for case in STORES]
    for row in times:
        print(json.dumps(row))
    swept = sweep(cases, args.sweep) if args.sweep else []
    for case in dict.fromkeys(row["case"] for row in swept):
        best = sorted((row for row in swept if row["case"] == case), key=lambda r: r["us"])
        print(case, *(f"  {r['us']:.2f} {r['setting']}" for r in best[:10]), sep="\n")
    if args.out:
        args.out.write_text(json.dumps({"checks": checks, "times": times, "sweep": swept}, indent=1))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
