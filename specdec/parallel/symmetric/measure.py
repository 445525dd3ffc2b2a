"""How long ranks of this machine take to sum a layer's partial sums, add and norm them: through GPUs' memory, and over NCCL.

It starts a process for each GPU but the first, as a decoder does, and measures on random rows of bf16.
"""

from __future__ import annotations

import statistics
import warnings
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.parallel.group import Group
from specdec.parallel.processes import RankPipe, Rendezvous, start
from specdec.parallel.symmetric.group import SymmetricGroup

ROWS, HIDDEN = (1, 8, 64, 1024), 4096
CALLS, REPLAYS = 20, 9


class AllReduceTimes(NamedTuple):
    """size: ranks.  problem: why they do not use each other's memory, empty if they do.  us: microseconds of a call for each of
    ROWS, by way: "memory" and "NCCL".
    """

    size: int
    problem: str
    us: dict[str, list[float]]

    def __str__(self) -> str:
        rows = ", ".join(map(str, ROWS))
        times = "; ".join(f"{way} {', '.join(f'{us:.1f}' for us in found)} us" for way, found in self.us.items())
        taken = f"over NCCL ({self.problem})" if self.problem else "through each other's memory"
        return f"{taken}; sum + norm of {rows} rows x {HIDDEN}: {times}"


def measure(size: int) -> AllReduceTimes:
    """Measures with `size` GPUs.  RankFailed if a rank failed."""
    ranks = start(size, _take_part)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ranks.join(torch.device("cuda", 0))
        group = ranks.group
        us = _times(group)
        ranks.wait("measured")
    finally:
        ranks.close()
    return AllReduceTimes(size, "" if isinstance(group, SymmetricGroup) else "; ".join(str(each.message) for each in said), us)


def _take_part(rendezvous: Rendezvous, pipe: RankPipe) -> None:
    torch.cuda.set_device(rendezvous.rank)
    pipe.tell("here")
    _times(rendezvous.join(torch.device("cuda", rendezvous.rank)))
    pipe.tell("measured")


@torch.inference_mode()
def _times(group: Group) -> dict[str, list[float]]:
    ways = {"memory": group, "NCCL": group.base} if isinstance(group, SymmetricGroup) else {"NCCL": group}
    with torch.cuda.device(group.rank):
        return {name: [_microseconds(way, rows) for rows in ROWS] for name, way in ways.items()}


def _microseconds(group: Group, rows: int) -> float:
    x = torch.randn(rows, HIDDEN, generator=torch.Generator("cuda"), dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(HIDDEN, dtype=x.dtype, device="cuda")
    chain = partial(_chain, group, x, weight)
    chain()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        chain()
    times = []
    for _ in range(REPLAYS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) * 1e3 / CALLS)
    return statistics.median(times)


def _chain(group: Group, x_TH: Tensor, weight_H: Tensor) -> None:
    partial_TH = x_TH
    for _ in range(CALLS):
        x_TH, partial_TH = group.all_reduce_add_rms_norm(x_TH, partial_TH, weight_H, 1e-5)
