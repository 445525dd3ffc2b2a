"""All-reduce + residual + RMS norm: one kernel over the GPUs' shared memory against NCCL and the norm's kernel, in bf16.

    python benchmarks products.all_reduce [--ranks 2] [--out FILE] [--rows 1 6 8] [--hidden 4096 8192]

A CUDA graph runs a chain of calls, each of which needs the one before; a time is a call's share of the median replay, the
largest of all ranks.  "messages" and "marks" are the kernel's two ways, whatever the number of rows; "chosen" is the one that
SymmetricGroup takes.  NCCL runs without NVLink's multicast.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from graph_timing import replay_us
from torch import Tensor

from specdec.ops.norm import add_rms_norm
from specdec.parallel.group import Group
from specdec.parallel.symmetric import group as symmetric
from specdec.parallel.symmetric.group import SymmetricGroup, connect

ROWS = (1, 6, 8, 32, 48, 64, 192, 1024, 8192)
HIDDEN = (4096, 8192)
EPS, DTYPE = 1e-5, torch.bfloat16
REPLAYS = 15
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Nccl(Group):
    """torch's NCCL, on its default group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, x: Tensor) -> Tensor:
        all_N = x.new_empty((self.size, *x.shape))
        dist.all_gather_into_tensor(all_N.view(-1), x.contiguous().view(-1))
        return all_N

    def all_reduce_and_norm(self, x_TH: Tensor, partial_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, Tensor]:
        dist.all_reduce(partial_TH)
        return add_rms_norm(x_TH, partial_TH, weight_H, EPS)


def timed(step: Step, rows: int, hidden: int, group: Group) -> float:
    """Microseconds of one step in a chain."""
    calls = 40 if rows <= 256 else 8
    x = torch.randn(rows, hidden, dtype=DTYPE, device="cuda")
    first, weight = torch.randn_like(x), torch.ones(hidden, dtype=DTYPE, device="cuda")

    def chain() -> None:
        total, partial_sum = x, first.clone()
        for _ in range(calls):
            total, partial_sum = step(total, partial_sum, weight)

    for _ in range(2):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        chain()
    torch.cuda.synchronize()
    mine = torch.tensor([replay_us(graph, REPLAYS) / calls], device="cuda")
    return round(float(group.all_gather(mine).max()), 2)


def steps_of(ours: SymmetricGroup, nccl: Nccl, rows: int, hidden: int) -> dict[str, Step]:
    def forced(few: bool) -> Step:
        def step(x_TH: Tensor, partial_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, Tensor]:
            symmetric.MAX_AS_MESSAGES = 1 << 40 if few else 0
            return ours.all_reduce_add_rms_norm(x_TH, partial_TH, weight_H, EPS)

        return step

    def chosen(x_TH: Tensor, partial_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, Tensor]:
        symmetric.MAX_AS_MESSAGES = CHOSEN
        return ours.all_reduce_add_rms_norm(x_TH, partial_TH, weight_H, EPS)

    steps: dict[str, Step] = {"chosen": chosen, "marks": forced(False), "nccl": nccl.all_reduce_and_norm}
    return steps | ({"messages": forced(True)} if rows <= ours.inbox.layout.channels else {})


CHOSEN = symmetric.MAX_AS_MESSAGES


def run(rank: int, args: argparse.Namespace, port: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks)
    with torch.inference_mode():
        nccl = Nccl()
        ours = connect(nccl, torch.device("cuda", rank))
        assert isinstance(ours, SymmetricGroup)
        table: list[dict[str, Any]] = []
        for hidden in args.hidden:
            for rows in args.rows:
                times = {name: timed(step, rows, hidden, nccl) for name, step in steps_of(ours, nccl, rows, hidden).items()}
                table.append({"rows": rows, "hidden": hidden, "us": times})
                if rank == 0:
                    print(f"{rows:6d} x {hidden}: " + "  ".join(f"{name} {us:8.2f}" for name, us in times.items()), flush=True)
                if rank == 0 and args.out:  # after each line: a run that is cut keeps what it has
                    save(args.out, table, args.ranks)
    dist.destroy_process_group()


def save(path: Path, table: list[dict[str, Any]], ranks: int) -> None:
    facts = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "ranks": ranks,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "unit": "microseconds a call",
        "table": table,
    }
    path.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    args = parser.parse_args()
    if args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks must be at most the {torch.cuda.device_count()} GPUs of this machine, got {args.ranks}")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    mp.spawn(run, args=(args, _free_port()), nprocs=args.ranks)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
