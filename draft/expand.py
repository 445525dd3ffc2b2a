"""Growing the tree level by level, as EAGLE-2 does (arXiv 2406.16858): the candidates so far, and the beam that goes on.

Pure tensor code over scores and parents; knows no head and no cache.

Shapes: B sequences, K topk, C candidates so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.draft.topk import stable_topk


@dataclass(frozen=True)
class Candidates:
    """All tokens proposed so far, level by level: K of level 1, then K * K of each further level.

    tokens_BC: int64 target ids.  scores_BC: float32 sums of log-probabilities along the path.
    parents_BC: int64 index of the parent among the candidates; -1 for children of the root.
    """

    tokens_BC: Tensor
    scores_BC: Tensor
    parents_BC: Tensor


@dataclass(frozen=True)
class Beam:
    """The K branches that are expanded next.  indices_BK: their candidates; parents_BK: which branch each grew from."""

    tokens_BK: Tensor
    scores_BK: Tensor
    indices_BK: Tensor
    parents_BK: Tensor


def first_level(tokens_BK: Tensor, logp_BK: Tensor) -> tuple[Candidates, Beam]:
    """Level 1: the root's children are candidates and beam at once."""
    branches_BK = torch.arange(tokens_BK.shape[1], device=tokens_BK.device).expand_as(tokens_BK)
    candidates = Candidates(tokens_BK, logp_BK, torch.full_like(tokens_BK, -1))
    return candidates, Beam(tokens_BK, logp_BK, branches_BK, branches_BK)


def next_level(candidates: Candidates, beam: Beam, tokens_BKK: Tensor, logp_BKK: Tensor) -> tuple[Candidates, Beam]:
    """Adds each branch's K children; the best K of them are the next beam.

    A child's score never exceeds its parent's (log-probabilities are <= 0) and its index is always larger.
    """
    B, K, _ = tokens_BKK.shape
    start = candidates.tokens_BC.shape[1]
    tokens, scores = tokens_BKK.flatten(1), (beam.scores_BK[:, :, None] + logp_BKK).flatten(1)
    parents = beam.indices_BK[:, :, None].expand(B, K, K).flatten(1)
    top_scores, top = stable_topk(scores, K)
    grown = Candidates(
        torch.cat((candidates.tokens_BC, tokens), 1),
        torch.cat((candidates.scores_BC, scores), 1),
        torch.cat((candidates.parents_BC, parents), 1),
    )
    return grown, Beam(tokens.gather(1, top), top_scores, start + top, top // K)
