"""Encoder attention: each token of a text reads the tokens of the same text on both sides of it, and nothing is cached.

Keys and values are those that the pass has just computed, so the backend reads them as slots of a view of their own.  This
module knows no model and no cross attention.

Shapes: T tokens of all texts, B texts, Q query heads, K kv heads, D head dim, W tokens of the longest text.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment
from specdec.attention.state import with_sinks


def encoder_segment(cu_seqlens: Tensor, longest: int, positions_T: Tensor, reach: int | None, *, ragged: bool) -> Segment:
    """What the tokens of the texts read, which lie one after the other: all of their own text, or what lies within `reach`
    tokens on either side.

    cu_seqlens: [B + 1] int32, cumulative lengths of the texts.
    longest: W; the host knows it.
    positions_T: each token's place in its text, from 0, int64.
    reach: transformers' sliding_window of a layer that looks in both directions: the distance itself is still read.
    ragged: whether the texts may differ in length.
    """
    assert reach is None or reach >= 0, reach
    table_BW = cu_seqlens[:-1, None] + torch.arange(longest, dtype=torch.int32, device=cu_seqlens.device)
    whole = Segment(PageTable(table_BW), cu_seqlens.diff(), cu_seqlens, longest, ragged=ragged)
    if reach is None:
        return whole
    starts_T = (positions_T - reach).clamp(min=0).int()
    return replace(whole, causal=True, window_right=reach, starts_T=starts_T, span=2 * reach + 1)


def attend_texts(
    backend: Backend, q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segment: Segment, scoring: Scoring = PLAIN
) -> Tensor:
    """[T, Q, D].  segment: the result of `encoder_segment`."""
    assert scoring.slopes_H is None, "no encoder here has ALiBi, whose sign in both directions no model defines"
    state = backend.run(q_TQD, MHAView(torch.stack((k_TKD, v_TKD), dim=1)), segment, scoring)
    return with_sinks(state, scoring.sinks_H).out_THD
