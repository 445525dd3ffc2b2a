"""A plan as specdec's kernels use it: paged segments, perhaps a suffix, and scratch memory.  This module knows no kernel.

Shapes: T queries, H heads, D head dim, S states of a query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.attention.segment import Segment
from specdec.attention.state import AttentionState


@dataclass(frozen=True)
class TritonPlan:
    """A plan, and the scratch memory that its layers share.  The first layer allocates it: only layers know the number of
    heads.

    schedules: what a library computes from the plan alone, such as how it divides the pages over the GPU.  Its keys are the
        backend's.
    """

    segments: tuple[Segment, ...]
    suffix: Segment | None = None
    schedules: dict[Any, Any] = field(default_factory=dict)
    _scratch: dict[tuple[int, ...], AttentionState] = field(default_factory=dict)

    def scratch(self, T: int, H: int, S: int, D: int, device: torch.device) -> AttentionState:
        """Memory for partial states: out [T, H, S, D] and lse [T, H, S], float32."""
        if (T, H, S, D) not in self._scratch:
            self._scratch[T, H, S, D] = AttentionState.empty((T, H, S, D), torch.float32, device)
        return self._scratch[T, H, S, D]
