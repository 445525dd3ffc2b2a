"""Which kind of GPU the tiles of products were measured for: the GPU's own kind, or the nearest one.

A product of few rows waits for memory, so the kind with the nearest bandwidth is the nearest one.  This module knows names and
bandwidths, and no tiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch


class GpuKind(NamedTuple):
    """A kind of GPU for which tiles were measured.  bandwidth: bytes per second, by the clock and width of its memory."""

    name: str
    bandwidth: float


H100, H200 = GpuKind("H100", 3.35e12), GpuKind("H200", 4.92e12)
SAME = 0.1  # threshold: by how much of a kind's bandwidth a GPU of its name may differ; an H100 PCIe or NVL differs by more


class GpuMatch(NamedTuple):
    """The kind whose tiles a GPU takes, and why, as a line for people.

    hopper: whether the GPU runs kernels that are written for Hopper alone.  is_own: whether the kind is the GPU's own.
    """

    kind: GpuKind
    why: str
    hopper: bool
    is_own: bool = False


def nearest(name: str, bandwidth: float | None, capability: tuple[int, int]) -> GpuMatch:
    """The kind for a GPU of that name; bandwidth: bytes per second, or None where the driver does not say."""
    hopper = capability == (9, 0)
    for kind in (H100, H200):
        is_same = bandwidth is None or abs(bandwidth - kind.bandwidth) <= SAME * kind.bandwidth
        if hopper and is_same and kind.name in name.split():
            return GpuMatch(kind, f"those measured on an {kind.name}", hopper, is_own=True)
    if bandwidth is None:
        return GpuMatch(
            H100, f"those of an {H100.name}: none were measured on this GPU, and its driver names no bandwidth", hopper
        )
    kind = min((H100, H200), key=lambda each: abs(each.bandwidth - bandwidth))
    why = f"those of an {kind.name}, which is nearest to this GPU's {bandwidth / 1e12:.2f} TB/s: none were measured here"
    return GpuMatch(kind, why, hopper)


@cache
def match_of(device: torch.device) -> GpuMatch:
    """The kind for one of this machine's GPUs."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some fields
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)  # kHz, bits
    bandwidth = 2 * clock * 1e3 * width / 8 or None  # two transfers a clock
    return nearest(properties.name, bandwidth, (properties.major, properties.minor))
