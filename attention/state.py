"""The state of a partial softmax, and how two of them become one.  Knows nothing of keys, pages or kernels.

Shapes: T queries, H heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionState(NamedTuple):
    """Softmax over some of the keys: out_THD normalised over them, lse_TH the natural log of their summed exponentials.

    A row that read no key has out 0 and lse -inf.
    """

    out_THD: Tensor
    lse_TH: Tensor

    @classmethod
    def empty(cls, shape_of_out: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> AttentionState:
        """Memory for a state, unwritten; lse is float32.  The shape may hold more dims than [T, H, D]."""
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


def with_sinks(state: AttentionState, sinks_H: Tensor) -> AttentionState:
    """Adds a key of that logit and of value 0 to every row; once, whatever the state was merged from."""
    sink = sinks_H.to(state.lse_TH.dtype).expand_as(state.lse_TH)
    return merge_states(state, AttentionState(torch.zeros_like(state.out_THD), sink))
