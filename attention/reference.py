"""The oracle: attention of one segment by the definition, a row and a query at a time.  Any device, any float type.

Slow on purpose: no padding, no packing, nothing to get wrong.  The other backends are tested against it in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.kv_cache import KVView
from specdec.attention.segment import Segment
from specdec.attention.state import AttentionState


class ReferenceBackend(Backend):
    """Runs each segment by the definition and merges the states."""

    name = "reference"

    def run(self, q_THD: Tensor, view: KVView, segment: Segment) -> AttentionState:
        T, H, D = q_THD.shape
        out_THD, lse_TH = torch.zeros_like(q_THD), q_THD.new_full((T, H), -torch.inf)
        for row in range(segment.rows):
            start, end = int(segment.cu_seqlens_q[row]), int(segment.cu_seqlens_q[row + 1])
            length = int(segment.cache_seqlens[row])
            positions = torch.arange(length, device=q_THD.device)
            pages = segment.page_table[row, positions // segment.page_size].long()
            slots = pages * segment.page_size + positions % segment.page_size
            for t in range(start, end):
                visible = slots[: max(0, length - (end - 1 - t))] if segment.causal else slots
                if visible.numel():
                    out_THD[t], lse_TH[t] = attend_one(q_THD[t], view.k[visible], view.v[visible])
        return AttentionState(out_THD, lse_TH)


def attend_one(q_HD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, Tensor]:
    """One query against N keys: (out [H, D], natural-log lse [H])."""
    group = q_HD.shape[0] // k_NKD.shape[1]
    k_NHD, v_NHD = (x.to(q_HD.dtype).repeat_interleave(group, dim=1) for x in (k_NKD, v_NKD))
    scores_HN = torch.einsum("hd,nhd->hn", q_HD, k_NHD) / q_HD.shape[-1] ** 0.5
    lse_H = scores_HN.logsumexp(-1)
    return torch.einsum("hn,nhd->hd", (scores_HN - lse_H[:, None]).exp(), v_NHD), lse_H
