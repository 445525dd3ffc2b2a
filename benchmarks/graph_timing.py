"""How long a captured CUDA graph takes.  The benchmarks of single kernels share this."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

UNCOUNTED = 3  # first replays, which may find clocks and caches cold


def replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """The median microseconds of so many replays, each timed alone."""
    times = []
    for _ in range(UNCOUNTED + replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[UNCOUNTED:])


def timed(step: Callable[[Any], list[Tensor]], world: Any, replays: int) -> tuple[float, Tensor]:
    """Microseconds a layer under a CUDA graph, and the last layer's output.  world: what the step takes; it has `layers`."""
    step(world)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step(world)
    for out in outs:
        out.fill_(float("nan"))
    return replay_us(graph, replays) / world.layers, outs[-1]
