"""Where in its prediction an answer has come to.  Pure tensor code; on a GPU one kernel finds places and writes paths, and
another one follows what is emitted (places_triton.py).

A place is the number of a prediction's token.  Before its first token a prediction, as an answer, counts as if it had tokens of
-1 only, which are equal: so an answer that has agreed from its beginning on matches as well as one can.

Shapes: B rows, X tokens of the longest prediction, M = MAX_MATCH, P = 2 paths, D tokens of a path, E tokens of a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.draft.join.paths import Paths
from specdec.draft.join.survival import IN_STEP, ONCE
from specdec.draft.ngram.lookup import MAX_MATCH, SHIFT, nearness
from specdec.ops.index import arange, use_index_kernels

if TYPE_CHECKING:
    from specdec.draft.prediction.source import PredictionRows

LEAST = 2  # threshold: the answer is taken to be at a match of so many tokens; at a shorter one it may be by chance


def place_keys(rows: PredictionRows) -> Tensor:
    """[B, X] int64: for each place, length << SHIFT | nearness to where the answer would be; -1 from the prediction's end on.

    Of two places as near, the one after counts as nearer.
    """
    B, X = rows.ids_RX.shape
    places_X, ids_BX = arange(X, rows.ids_RX.device), rows.ids_RX.long()
    equal_BX = torch.ones(B, X, dtype=torch.bool, device=ids_BX.device)
    length_BX = torch.zeros_like(ids_BX)
    for back in range(1, MAX_MATCH + 1):
        before_X = places_X - back
        id_BX = torch.where(before_X >= 0, ids_BX[:, before_X.clamp(min=0)], -1)
        equal_BX = equal_BX & (id_BX == rows.recent_RM[:, -back, None])
        length_BX = length_BX + equal_BX
    apart_BX = places_X - rows.at_R[:, None]
    return torch.where(places_X < rows.sizes_R[:, None], length_BX << SHIFT | nearness(apart_BX), -1)


def fill_paths(rows: PredictionRows, depth: int, out: Paths) -> None:
    """Writes two paths of each row, see `PathFinder.fill`: from the best place on, and from where the answer would be, or from
    the second best place if both are one or the prediction has ended there.  A path from where the answer would be is IN_STEP.
    """
    if use_index_kernels(rows.at_R):
        from specdec.draft.prediction.places_triton import launch_paths

        return launch_paths(rows, depth, out)
    if not rows.ids_RX.is_cuda:  # where the host may look, no more is searched than there is
        rows = replace(rows, ids_RX=rows.ids_RX[:, : max(1, int(rows.sizes_R.max()))])
    keys_BX = place_keys(rows)
    best_B2 = _with_two(keys_BX).topk(2, dim=1)
    at_B, sizes_B = rows.at_R, rows.sizes_R
    first_B, second_B = best_B2.indices.unbind(1)
    takes_pace_B = (at_B != first_B) & (at_B < sizes_B)
    pace_key_B = keys_BX.gather(1, at_B.clamp(max=keys_BX.shape[1] - 1)[:, None])[:, 0]
    second_B = torch.where(takes_pace_B, at_B, second_B)
    key_B2 = torch.stack((best_B2.values[:, 0], torch.where(takes_pace_B, pace_key_B, best_B2.values[:, 1])), dim=1)
    lengths_B2 = (key_B2 >> SHIFT).clamp(min=0)
    rows.found_R.copy_(torch.where(lengths_B2[:, 0] >= LEAST, first_B, at_B))
    out.lengths_BP.copy_(lengths_B2)
    is_in_step_B2 = (torch.stack((first_B, second_B), dim=1) == at_B[:, None]) & (key_B2 >= 0)
    out.support_BP.copy_(ONCE + (IN_STEP - ONCE) * is_in_step_B2.long())
    out.tokens_BPD.fill_(-1)
    positions_BPD = torch.stack((first_B, second_B), dim=1)[..., None] + arange(depth, at_B.device)
    is_there_BPD = (positions_BPD < sizes_B[:, None, None]) & (key_B2 >= 0)[..., None]
    inside_BX = positions_BPD.clamp(max=rows.ids_RX.shape[1] - 1).flatten(1)
    tokens_BPD = rows.ids_RX.gather(1, inside_BX).view_as(positions_BPD).long()
    out.tokens_BPD[..., :depth] = torch.where(is_there_BPD, tokens_BPD, -1)


def _with_two(keys_BX: Tensor) -> Tensor:
    """The keys, of two places at least."""
    return keys_BX if keys_BX.shape[1] > 1 else torch.cat((keys_BX, torch.full_like(keys_BX, -1)), dim=1)


def follow(rows: PredictionRows, tokens_BE: Tensor, counts_B: Tensor) -> None:
    """Moves answers on by the first counts_B of these tokens; at places that `fill_paths` found."""
    if use_index_kernels(tokens_BE):
        from specdec.draft.prediction.places_triton import launch_follow

        return launch_follow(rows, tokens_BE, counts_B)
    both_BX = torch.cat((rows.recent_RM, tokens_BE), dim=1)
    rows.recent_RM.copy_(both_BX.gather(1, counts_B[:, None] + arange(MAX_MATCH, tokens_BE.device)))
    rows.at_R.copy_(torch.where(counts_B > 0, rows.found_R + counts_B, rows.at_R))
