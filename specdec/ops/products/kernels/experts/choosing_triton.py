"""The choice of a token's experts, and what they weigh, given its logits: what both of a router's kernels end with.

A warp chooses a token's experts: its lanes hold neighbouring experts, each thread one of each group, so that a choice takes two
instructions for the whole warp and no shared memory.  Where the rule knows no groups, runs of 32 experts stand for them.

Keys order experts by rank (specdec/ops/topk_triton.py), NaN above all, and of equal ones the lower number is chosen; so every
id is an expert's, whatever the logits are.  Pairs that are computed elsewhere, or not at all, are skipped as own_pairs.py says.

Shapes: T tokens, M tokens of a program, E experts, A experts of a token (top_k), B rows of the batch, G groups of J experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.topk_triton import LOWEST_32, ordered_32, value_of_32

if TYPE_CHECKING:
    from specdec.ops.products.own_pairs import Kept
    from specdec.ops.products.routing import Routed, RouterRule, RouterWeights

LANES = 32  # of a warp
NONE = tl.constexpr(2**31 - 1)  # above every expert's number


@triton.jit
def choose_and_store(
    partials, bias, correction, active, last, topk_weights, topk_ids, shared, first, end, T, places,
    L: tl.constexpr, E: tl.constexpr, G: tl.constexpr, J: tl.constexpr, A: tl.constexpr, SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    NORMED: tl.constexpr, LEAST_SUM: tl.constexpr, SCALING: tl.constexpr, PADDED_G: tl.constexpr, PADDED_J: tl.constexpr,
    FIRST: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_LAST: tl.constexpr,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Of the tokens from `first` on, below `end`, whose partial logits [SPLITS, T, L | 1] lie in memory.

    The odd rows make the compiler give a warp's lanes a number each, and not a few of neighbours.
    """
    ROW: tl.constexpr = L | 1
    m, j = first + tl.arange(0, TOKENS), tl.arange(0, PADDED_J)
    e_GJ = tl.arange(0, PADDED_G)[:, None] * J + j[None, :]
    ok_GJ = (j < J)[None, :] & (e_GJ < E)
    e_GJ = tl.where(ok_GJ, e_GJ, NONE)
    ok_GMJ = (m < end)[None, :, None] & ok_GJ[:, None, :]
    at_GMJ = m[None, :, None] * ROW + e_GJ[:, None, :]
    logit_GMJ = tl.zeros([PADDED_G, TOKENS, PADDED_J], tl.float32)
    for s in tl.static_range(SPLITS):  # from L2 (.cg), since this SM's L1 may hold old data
        logit_GMJ += tl.load(partials + s * T * ROW + at_GMJ, mask=ok_GMJ, other=0.0, cache_modifier=".cg")
    if HAS_BIAS:
        logit_GMJ += tl.load(bias + e_GJ, mask=ok_GJ, other=0.0)[:, None, :]
    score_GMJ = _scores(logit_GMJ, ok_GJ, SCORES)
    rank_GMJ = score_GMJ
    if HAS_CORRECTION:
        rank_GMJ += tl.load(correction + e_GJ, mask=ok_GJ, other=0.0)[:, None, :]
    key_GMJ = tl.where(ok_GJ[:, None, :], ordered_32(rank_GMJ), LOWEST_32)
    if TOP_GROUPS < G:
        key_GMJ = _of_best_groups(key_GMJ, e_GJ, ok_GJ, G, TOP_GROUPS, GROUP_BEST)
    id_MJ, weight_MJ = _best(key_GMJ, score_GMJ, e_GJ, j, places, HAS_CORRECTION)
    weight_MJ = _weights(weight_MJ, (j < A)[None, :], SCORES, NORMED, LEAST_SUM) * SCALING
    id_MJ -= FIRST
    ok_MJ = (m < end)[:, None] & (j < A)[None, :]
    keeps_MJ = ok_MJ & (id_MJ >= 0) & (id_MJ < COUNT)
    if HAS_ROWS:
        keeps_MJ &= (tl.load(active + m // COLUMNS, mask=m < end, other=0) != 0)[:, None]
        if HAS_LAST:
            keeps_MJ &= (m % COLUMNS <= tl.load(last + m // COLUMNS, mask=m < end, other=0))[:, None]
    id_MJ, weight_MJ = tl.where(keeps_MJ, id_MJ, COUNT), tl.where(keeps_MJ, weight_MJ, 0.0)
    tl.store(topk_weights + m[:, None] * A + j[None, :], weight_MJ, mask=ok_MJ)
    tl.store(topk_ids + m[:, None] * A + j[None, :], id_MJ.to(tl.int64), mask=ok_MJ)
    if L > E:
        logit_M = tl.zeros([TOKENS], tl.float32)
        for s in tl.static_range(SPLITS):
            logit_M += tl.load(partials + (s * T + m) * ROW + E, mask=m < end, other=0.0, cache_modifier=".cg")
        tl.store(shared + m, 1 / (1 + tl.exp(-logit_M)), mask=m < end)


@triton.jit
def _scores(logit_GMJ, ok_GJ, SCORES: tl.constexpr):
    """The softmax over a token's experts, the sigmoid of each, or the logits themselves."""
    if SCORES == "sigmoid":
        logit_GMJ = 1 / (1 + tl.exp(-logit_GMJ))
    elif SCORES == "softmax":
        peak_M = tl.max(tl.max(tl.where(ok_GJ[:, None, :], logit_GMJ, -float("inf")), 0), 1)
        part_GMJ = tl.where(ok_GJ[:, None, :], tl.exp(logit_GMJ - peak_M[None, :, None]), 0.0)
        logit_GMJ = part_GMJ * (1 / tl.sum(tl.sum(part_GMJ, 0), 1))[None, :, None]
    return logit_GMJ


@triton.jit
def _of_best_groups(
    key_GMJ, e_GJ, ok_GJ, G: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr
):  # fmt: skip
    """The keys, with that of -inf in place of those of all but the token's best groups."""
    left_GMJ, sum_GM = key_GMJ, tl.zeros([key_GMJ.shape[0], key_GMJ.shape[1]], tl.float32)
    for _ in tl.static_range(GROUP_BEST):
        best_GM = tl.max(left_GMJ, 2)
        sum_GM += value_of_32(best_GM)
        id_GM = tl.min(tl.where(left_GMJ == best_GM[:, :, None], e_GJ[:, None, :], NONE), 2)
        left_GMJ = tl.where(e_GJ[:, None, :] == id_GM[:, :, None], LOWEST_32, left_GMJ)
    g = tl.arange(0, key_GMJ.shape[0])
    key_GM = tl.where((g < G)[:, None], ordered_32(sum_GM), LOWEST_32)
    for _ in tl.static_range(TOP_GROUPS):
        best_M = tl.min(tl.where(key_GM == tl.max(key_GM, 0)[None, :], g[:, None], NONE), 0)
        key_GM = tl.where(g[:, None] == best_M[None, :], LOWEST_32, key_GM)
    lowest = tl.where(ok_GJ, ordered_32(tl.full([], -float("inf"), tl.float32)), LOWEST_32)
    return tl.where((key_GM == LOWEST_32)[:, :, None], key_GMJ, lowest[:, None, :])


@triton.jit
def _best(key_GMJ, score_GMJ, e_GJ, j, places, HAS_CORRECTION: tl.constexpr):
    """(ids int32, scores) of the experts with the largest keys, [M, J] each, the best first; 0 from `places` on.

    Keys are the scores' own unless HAS_CORRECTION.  The compiler does not know `places`, so that the loop stays one: unrolled,
    its instructions are more than an SM fetches fast.
    """
    id_MJ = tl.zeros([key_GMJ.shape[1], key_GMJ.shape[2]], tl.int32)
    best_MJ = tl.zeros([key_GMJ.shape[1], key_GMJ.shape[2]], tl.float32)
    for place in tl.range(0, places, num_stages=1):
        key_M = tl.max(tl.max(key_GMJ, 0), 1)
        id_M = tl.min(tl.min(tl.where(key_GMJ == key_M[None, :, None], e_GJ[:, None, :], NONE), 0), 1)
        is_best_GMJ = e_GJ[:, None, :] == id_M[None, :, None]
        key_GMJ = tl.where(is_best_GMJ, LOWEST_32, key_GMJ)
        if HAS_CORRECTION:
            score_M = tl.sum(tl.sum(tl.where(is_best_GMJ, score_GMJ, 0.0), 0), 1)
        else:
            score_M = value_of_32(key_M)
        id_MJ = tl.where((j == place)[None, :], id_M[:, None], id_MJ)
        best_MJ = tl.where((j == place)[None, :], score_M[:, None], best_MJ)
    return id_MJ, best_MJ


@triton.jit
def _weights(score_MJ, ok_J, SCORES: tl.constexpr, NORMED: tl.constexpr, LEAST_SUM: tl.constexpr):
    """What the scores of a token's experts weigh, before they are scaled."""
    if SCORES == "softmax of chosen":
        known_MJ = tl.where(ok_J, score_MJ, -float("inf"))
        part_MJ = tl.exp(known_MJ - tl.max(known_MJ, 1)[:, None])
        score_MJ = part_MJ / tl.sum(part_MJ, 1)[:, None]
    elif NORMED:
        sum_M = tl.sum(score_MJ, 1)
        if LEAST_SUM > 0:
            sum_M = tl.maximum(sum_M, LEAST_SUM)
        elif SCORES == "sigmoid":  # each of which may be 0
            sum_M += 1e-20
        score_MJ = score_MJ / sum_M[:, None]
    return score_MJ


class Choice(NamedTuple):
    """What a launch needs for `choose_and_store`.

    partials: [SPLITS, T, L | 1] float32.  tensors: from bias to shared, in its order; what the rule lacks is another tensor.
    constants: all that T does not change, but for SPLITS and TOKENS.
    """

    partials: Tensor
    tensors: tuple[Tensor, ...]
    constants: dict[str, Any]
    out: Routed


def choice_of(T: int, router: RouterWeights, rule: RouterRule, experts: int, splits: int, kept: Kept | None) -> Choice:
    """out: the results, which no kernel has written yet."""
    L, device, groups, power = len(router.weight_LH), router.weight_LH.device, rule.groups or 1, triton.next_power_of_2
    assert T and L - experts in (0, 1) and experts % groups == 0 and rule.top_k <= experts
    assert rule.biased == (router.bias_E is not None) and rule.corrected == (router.correction_E is not None)
    best = rule.top_groups or groups
    if best == groups:  # of any experts: as many groups as make a warp's lanes hold one
        best = groups = triton.cdiv(experts, LANES)
        width = LANES
    else:
        width = experts // groups
    held, live = kept or (range(experts), None)
    assert live is None or T % len(live.active_B) == 0
    columns = T // len(live.active_B) if live else 1
    last_B = live.last_B if live and columns > 1 else None
    partials = torch.empty(splits, T, L | 1, dtype=torch.float32, device=device)
    topk_weights_TK = torch.empty(T, rule.top_k, dtype=torch.float32, device=device)
    topk_ids_TK = torch.empty(T, rule.top_k, dtype=torch.int64, device=device)
    shared_T1 = torch.empty(T, 1, dtype=torch.float32, device=device) if L > experts else None
    tensors = (
        partials if router.bias_E is None else router.bias_E, partials if router.correction_E is None else router.correction_E,
        live.active_B if live else topk_ids_TK, topk_ids_TK if last_B is None else last_B, topk_weights_TK, topk_ids_TK,
        partials if shared_T1 is None else shared_T1,
    )  # fmt: skip
    constants = dict(
        L=L, E=experts, G=groups, J=width, A=rule.top_k, SCORES=rule.scores, HAS_BIAS=rule.biased,
        HAS_CORRECTION=rule.corrected, TOP_GROUPS=best, GROUP_BEST=rule.group_best, NORMED=rule.normed,
        LEAST_SUM=rule.least_sum, SCALING=rule.scaling, PADDED_G=power(groups),
        PADDED_J=max(power(width), power(rule.top_k)), FIRST=held.start, COUNT=len(held), COLUMNS=columns,
        HAS_ROWS=live is not None, HAS_LAST=last_B is not None,
    )  # fmt: skip
    return Choice(partials, tensors, constants, (topk_weights_TK, topk_ids_TK, shared_T1))
