"""Attention by its definition: one dense softmax over the keys that each query sees, in float64.

This module knows no page, no segment and no state.  Shapes: N queries, X keys, H heads, K kv heads, D head dim, E value dim.
"""

import torch
from torch import Tensor

from specdec.attention.kinds import PLAIN, LayerKind, Scoring


def dense_attention(
    q_NHD: Tensor,
    k_XKD: Tensor,
    v_XKE: Tensor,
    seen_NX: Tensor | None = None,
    scoring: Scoring = PLAIN,
    distance_NX: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [N, H, E], natural-log lse [N, H] of the keys, without sinks), float64.

    distance_NX: each key's position minus the query's; slopes need it.
    seen_NX: bool, which keys a query reads; None: all.  A query that sees no key and has no sink gets 0, lse -inf.
    """
    H = q_NHD.shape[1]
    q, k, v = (x.double() for x in (q_NHD, k_XKD, v_XKE))
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,xhd->nhx", q, k) * (q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    if scoring.slopes_H is not None:
        assert distance_NX is not None
        far_NX = -distance_NX.double().neg().clamp(min=0).sqrt() if scoring.sqrt_alibi else distance_NX
        scores = scores + scoring.slopes_H.double()[:, None] * far_NX[:, None]
    if seen_NX is not None:
        scores = scores.masked_fill(~seen_NX[:, None], -torch.inf)
    lse_NH = scores.logsumexp(-1)
    total_NH = lse_NH if scoring.sinks_H is None else torch.logaddexp(lse_NH, scoring.sinks_H.double())
    total_NH = torch.where(total_NH == -torch.inf, 0.0, total_NH)
    probs = (scores - total_NH[..., None]).exp()
    return torch.einsum("nhx,xhe->nhe", probs, v), lse_NH


def causal_mask(queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
    """[N, X] bool: the queries stand at the last positions."""
    at_N = torch.arange(queries, device=device)[:, None] + keys - queries
    return torch.arange(keys, device=device) <= at_N


def of_kind(kind: LayerKind, at_N: Tensor, at_X: Tensor) -> Tensor:
    """[N, X] bool: what a layer of that kind lets a query at position at_N read of the keys at at_X, whatever comes later."""
    seen = torch.ones(len(at_N), len(at_X), dtype=torch.bool, device=at_N.device)
    if kind.window:
        seen &= at_X > at_N[:, None] - kind.window
    if kind.skip:
        seen &= at_X >= kind.skip
    if kind.chunk:
        seen &= at_X // kind.chunk == at_N[:, None] // kind.chunk
    return seen
