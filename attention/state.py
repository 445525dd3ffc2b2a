"""The state of a softmax over some of the keys, and how two such states become one.  This module knows no keys, pages or
kernels.

Shapes: T queries, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels


class AttentionState(NamedTuple):
    """A softmax over some of the keys.

    out_THD: the values' average, normalised over these keys alone.
    lse_TH: the natural log of the keys' summed exponentials.
    A query that read no key has out 0 and lse -inf.
    """

    out_THD: Tensor
    lse_TH: Tensor

    @classmethod
    def empty(cls, shape_of_out: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> AttentionState:
        """Uninitialised memory for a state; lse is float32.  The shape may have more dims than [T, H, D]."""
        lse = torch.empty(shape_of_out[:-1], dtype=torch.float32, device=device)
        return cls(torch.empty(shape_of_out, dtype=dtype, device=device), lse)


def merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    """Attention over the union of two disjoint sets of keys.  Both lse must be natural logs (FlashInfer's are base 2).

    lse = ln(e^a + e^b); out = (e^a out_a + e^b out_b) / (e^a + e^b).  Two empty states merge to an empty one, not NaN.
    """
    top_TH = torch.maximum(a.lse_TH, b.lse_TH)
    top_TH = torch.where(top_TH == -torch.inf, 0.0, top_TH)
    weight_a, weight_b = (a.lse_TH - top_TH).exp(), (b.lse_TH - top_TH).exp()
    total = weight_a + weight_b
    scale = torch.where(total > 0, 1 / total, 0.0)
    out = a.out_THD * (weight_a * scale)[..., None] + b.out_THD * (weight_b * scale)[..., None]
    return AttentionState(out.to(a.out_THD.dtype), top_TH + total.log())


def merge_all(states: Iterable[AttentionState]) -> AttentionState:
    """Attention over the union of one or more disjoint sets of keys."""
    return reduce(merge_states, states)


def with_sinks(state: AttentionState, sinks_H: Tensor | None) -> AttentionState:
    """Adds to every query one more key with that logit and value 0, if there are sinks.  Call it once, after all states have
    been merged.

    The given state may be changed.
    """
    if sinks_H is None:
        return state
    if use_kernels(state.out_THD):
        from specdec.attention.kernels.sinks_triton import launch_sinks

        return launch_sinks(state, sinks_H)
    sink = sinks_H.to(state.lse_TH.dtype).expand_as(state.lse_TH)
    return merge_states(state, AttentionState(torch.zeros_like(state.out_THD), sink))
