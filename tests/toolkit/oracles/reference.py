"""The definition of attention over a segment, computed one row and one query at a time, on any device and in any float type.

The code is slow on purpose: without padding or packing there is little to get wrong.  Tests compare the other attention
backends with it in float64.

Shapes: T queries, H heads, K kv heads, N keys, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.int8_keys import queries_as_read
from specdec.attention.caches.layout import KVView
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.segment import Segment
from specdec.attention.state import AttentionState


class ReferenceBackend(Backend):
    """An attention backend that computes each part of a plan by the definition and merges the states."""

    name = "reference"

    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        T, H, _ = q_THD.shape
        q_THD = queries_as_read(view, q_THD)
        outs, lse_TH = {}, q_THD.new_full((T, H), -torch.inf)
        width = 0
        for row in range(segment.rows):
            start, end = int(segment.cu_seqlens_q[row]), int(segment.cu_seqlens_q[row + 1])
            length = int(segment.cache_seqlens[row])
            positions = torch.arange(length, device=q_THD.device)
            pages = segment.pages.table[row, positions // segment.pages.page_size].long()
            k_NKD, v_NKE = view.read(pages * segment.pages.page_size + positions % segment.pages.page_size, q_THD.dtype)
            width = v_NKE.shape[2]
            for t in range(start, end):
                first = 0 if segment.starts_T is None else int(segment.starts_T[t])
                last = max(0, length - max(0, end - 1 - t - segment.window_right)) if segment.causal else length
                if first < last:
                    distance_N = (
                        None if segment.alibi_positions_T is None else positions[first:last] - int(segment.alibi_positions_T[t])
                    )
                    outs[t], lse_TH[t] = attend_one(q_THD[t], k_NKD[first:last], v_NKE[first:last], scoring, distance_N)
        out_THE = q_THD.new_zeros(T, H, width)
        for t, out_HE in outs.items():
            out_THE[t] = out_HE
        return AttentionState(out_THE, lse_TH)


def attend_one(
    q_HD: Tensor, k_NKD: Tensor, v_NKE: Tensor, scoring: Scoring, distance_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One query against N keys: (out [H, E], natural-log lse [H]).

    distance_N: each key's position minus the query's; slopes need it.
    """
    group = q_HD.shape[0] // k_NKD.shape[1]
    k_NHD, v_NHE = (x.repeat_interleave(group, dim=1) for x in (k_NKD, v_NKE))
    scale = q_HD.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores_HN = torch.einsum("hd,nhd->hn", q_HD, k_NHD) * scale
    if scoring.softcap is not None:
        scores_HN = scoring.softcap * (scores_HN / scoring.softcap).tanh()
    if scoring.slopes_H is not None:
        assert distance_N is not None
        far_N = -distance_N.to(scores_HN.dtype).neg().clamp(min=0).sqrt() if scoring.sqrt_alibi else distance_N
        scores_HN = scores_HN + scoring.slopes_H.to(scores_HN.dtype)[:, None] * far_N
    lse_H = scores_HN.logsumexp(-1)
    return torch.einsum("hn,nhe->he", (scores_HN - lse_H[:, None]).exp(), v_NHE), lse_H
