"""What is known of the GPUs that results are of: how fast they read, and what lines of rounds.round_8b must stay below."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GpuFacts(NamedTuple):
    """What is known of a GPU.  read_bandwidth: bytes per second, measured as the fastest of a few large sums.

    bars: milliseconds that a line, by its case's name or as "prefill:batch:tokens", must stay below.
    """

    read_bandwidth: float
    bars: dict[str, float]


GPUS = {
    "H100": GpuFacts(3.06e12, {
        "plain:1:1024": 5.9, "plain:32:1024": 8.0, "5,1,6:1:1024": 7.4, "5,1,6:8:1024": 8.2, "5,1,6:32:1024": 10.6,
        "5,8,32:1:1024": 7.8, "7,10,60:1:1024": 8.8, "5,1,6:1:32768": 9.2, "prefill:1:1024": 28.0, "prefill:32:1024": 800.0,
    }),
    "H200": GpuFacts(4.48e12, {
        "plain:1:1024": 3.95, "plain:32:1024": 5.10, "5,1,6:1:1024": 5.00, "5,1,6:8:1024": 5.50,
        "5,1,6:32:1024": 7.90, "5,8,32:1:1024": 5.00, "5,8,32:8:1024": 7.80, "7,10,60:1:1024": 5.60, "5,1,6:1:32768": 6.20,
        "prefill:1:1024": 24.0, "prefill:32:1024": 740.0,
    }),
}  # fmt: skip


CPU = GpuFacts(1e10, {})  # whereby scripts are tried: its times mean nothing


def need_gpu() -> None:
    """ValueError without one, before anything is compiled or measured."""
    if not torch.cuda.is_available():
        raise ValueError("this script needs an NVIDIA GPU, but torch sees none; nearest thing that works: a machine with one")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def this_gpu() -> GpuFacts:
    """ValueError on a GPU without bars: give it an entry of its own."""
    if not torch.cuda.is_available():
        return CPU
    name = device_name()
    known = next((gpu for short, gpu in GPUS.items() if short in name), None)
    if known is None:
        raise ValueError(f"nothing is known of {name}; expected one of {', '.join(GPUS)}, or a new entry in GPUS")
    return known
