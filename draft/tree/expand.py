"""Growing the tree level by level as EAGLE-2 does (arXiv 2406.16858): all candidates so far, and the beam that is expanded
next.

This is pure tensor code over scores and parents; on a GPU it launches its kernels.  It knows no head and no cache.

Shapes: B sequences, K topk, C candidates of all levels, R = B * K rows of logits, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.ops.index import arange
from specdec.ops.launch import use_kernels
from specdec.ops.noise.gumbel import Noise
from specdec.ops.topk import stable_topk
from specdec.parallel.vocabulary import Vocabulary

MAX_KERNEL_TOPK = 32  # threshold: with a larger topk, one program would sort more than its registers hold


@dataclass(frozen=True)
class Candidates:
    """All proposed tokens, level by level: K of level 1, then K * K of each further level.  Levels not grown yet hold junk.

    tokens_BC: int64 target ids.
    scores_BC: float32 sums of log-probabilities along the path.
    parents_BC: int64 index of the parent among the candidates; -1 for children of the root.
    """

    tokens_BC: Tensor
    scores_BC: Tensor
    parents_BC: Tensor

    @classmethod
    def empty(cls, rows: int, topk: int, num_steps: int, device: torch.device) -> Candidates:
        """Uninitialised memory for the candidates of num_steps levels."""
        shape = rows, topk + topk * topk * (num_steps - 1)
        tokens_BC, parents_BC = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
        return cls(tokens_BC, torch.empty(shape, dtype=torch.float32, device=device), parents_BC)


@dataclass(frozen=True)
class Beam:
    """The K branches that are expanded next.

    indices_BK: each branch's index among the candidates.
    parents_BK: the row of the previous step from which each branch grew; 0 at level 1.
    """

    tokens_BK: Tensor
    scores_BK: Tensor
    indices_BK: Tensor
    parents_BK: Tensor


def first_level(candidates: Candidates, tokens_BK: Tensor, logp_BK: Tensor) -> Beam:
    """Level 1: the root's children, which are all candidates and the beam at the same time."""
    B, K = tokens_BK.shape
    if use_kernels(logp_BK):
        from specdec.draft.tree.expand_triton import launch_first_level

        launch_first_level(candidates, tokens_BK, logp_BK)
    else:
        candidates.tokens_BC[:, :K] = tokens_BK
        candidates.scores_BC[:, :K] = logp_BK
        candidates.parents_BC[:, :K] = -1
    device = tokens_BK.device
    return Beam(tokens_BK, logp_BK, arange(K, device).expand(B, K), arange(1, device).expand(B, K))


def next_level(candidates: Candidates, level: int, beam: Beam, tokens_BKK: Tensor, logp_BKK: Tensor) -> Beam:
    """Adds each branch's K children at the given level (2 or deeper); the best K of all children are the next beam.

    A child's score never exceeds its parent's (log-probabilities are <= 0), and its index is always larger.
    """
    B, K, _ = tokens_BKK.shape
    start = K + K * K * (level - 2)
    tokens, scores = tokens_BKK.flatten(1), (beam.scores_BK[:, :, None] + logp_BKK).flatten(1)
    added = slice(start, start + K * K)
    candidates.tokens_BC[:, added] = tokens
    candidates.scores_BC[:, added] = scores
    candidates.parents_BC[:, added] = beam.indices_BK[:, :, None].expand(B, K, K).flatten(1)
    top_scores, top = stable_topk(scores, K)
    return Beam(tokens.gather(1, top), top_scores, start + top, top // K)


def expand(
    candidates: Candidates,
    level: int,
    beam: Beam,
    logits_RW: Tensor,
    offsets_V: Tensor | None,
    vocabulary: Vocabulary,
    noise: Noise | None = None,
) -> Beam:
    """`next_level` with the K most likely tokens of each branch.

    logits_RW: of this rank's run of the vocabulary; row b * K + k belongs to branch k of sequence b.
    offsets_V: int64 offsets from draft ids to target ids, or None.
    noise: what the target will add to its own logits of this level's tokens; None: nothing.
    Up to topk 32 this takes two kernel launches; a wider beam is grown by torch.
    """
    B, K = beam.tokens_BK.shape
    if K <= MAX_KERNEL_TOPK and vocabulary.use_kernels(logits_RW, K):
        from specdec.draft.tree.expand_triton import launch_expand

        return launch_expand(candidates, level, beam, logits_RW, offsets_V, vocabulary.scan(noise, offsets_V))
    logp_RK, tokens_RK = vocabulary.top(logits_RW, K, offsets_V, noise=noise)
    return next_level(candidates, level, beam, tokens_RK.view(B, K, K), logp_RK.view(B, K, K))
