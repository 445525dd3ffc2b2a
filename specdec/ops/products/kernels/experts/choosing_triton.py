"""The choice of a token's experts, and what they weigh, given its logits: what a router's kernels end with.

A warp chooses a token's experts: its lanes hold neighbouring experts, each thread one of each group, so that a choice takes two
instructions for the whole warp and no shared memory.  Where the rule knows no groups, runs of 32 experts stand for them.

Partial logits are read by one operation, in which a thread loads up to four splits of a logit at once: the compiler lets each
load of several wait until those before are added up.

Keys order experts by rank (specdec/ops/topk_triton.py), NaN above all, and of equal ones the lower number is chosen; so every
id is an expert's, whatever the logits are.  Pairs that are computed elsewhere, or not at all, are skipped as own_pairs.py says.

Shapes: T tokens, M tokens of a program, E experts, A experts of a token (top_k), B rows of the batch, G groups of J
experts, S splits of a logit that lie side by side, Q runs of them.
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
    from specdec.ops.products.routing import Routed, RouterRule, RouterWeights, Unchosen

LANES = 32  # of a warp
NONE = tl.constexpr(2**31 - 1)  # above every expert's number


@triton.jit
def place_of(split, t, n, T, L: tl.constexpr, SPLITS: tl.constexpr):
    """Where a split's part of logit n of token t lies: [Q, T, L | 1, S].

    The odd rows make the compiler give a warp's lanes a number each, and not a few of neighbours.
    """
    S: tl.constexpr = 4 if SPLITS > 2 else SPLITS
    return ((split // S * T + t) * (L | 1) + n) * S + split % S


@triton.jit
def _parts(partials, m, n, ok, T, L: tl.constexpr, SPLITS: tl.constexpr):
    """[Q, .., S], of logits n of tokens m.  From L2 (.cg), since this SM's L1 may hold old data."""
    S: tl.constexpr = 4 if SPLITS > 2 else SPLITS
    Q: tl.constexpr = triton.next_power_of_2((SPLITS + S - 1) // S)
    q = tl.arange(0, Q) * S
    for _ in tl.static_range(len(ok.shape) + 1):
        q = tl.expand_dims(q, -1)
    split, m, n, ok = q + tl.arange(0, S), _framed(m), _framed(n), _framed(ok)
    at = place_of(split, m, n, T, L, SPLITS)
    return tl.load(partials + at, mask=ok & (split < SPLITS), other=0.0, cache_modifier=".cg")


@triton.jit
def _framed(x):
    """[1, .., 1]"""
    return tl.expand_dims(tl.expand_dims(x, 0), -1)


@triton.jit
def of_experts(numbers, EXIST: tl.constexpr, E: tl.constexpr, J: tl.constexpr, PADDED_G: tl.constexpr, PADDED_J: tl.constexpr):
    """[G, J]: a number of each expert, as `choose_and_store` takes it; zeros if they do not exist."""
    e_GJ, ok_GJ = _numbers(E, J, PADDED_G, PADDED_J)
    if EXIST:
        found_GJ = tl.load(numbers + e_GJ, mask=ok_GJ, other=0.0)
    else:
        found_GJ = tl.zeros([PADDED_G, PADDED_J], tl.float32)
    return found_GJ


@triton.jit
def _numbers(E: tl.constexpr, J: tl.constexpr, PADDED_G: tl.constexpr, PADDED_J: tl.constexpr):
    """[G, J]: the experts' numbers, NONE where there is none, and whether there is one."""
    j = tl.arange(0, PADDED_J)
    e_GJ = tl.arange(0, PADDED_G)[:, None] * J + j[None, :]
    ok_GJ = (j < J)[None, :] & (e_GJ < E)
    return tl.where(ok_GJ, e_GJ, NONE), ok_GJ


@triton.jit
def choose_and_store(
    partials, bias_GJ, correction_GJ, active, last, topk_weights, topk_ids, shared, first, end, T, places,
    L: tl.constexpr, E: tl.constexpr, G: tl.constexpr, J: tl.constexpr, A: tl.constexpr, SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    NORMED: tl.constexpr, LEAST_SUM: tl.constexpr, ADDED_SUM: tl.constexpr, SCALING: tl.constexpr, PADDED_G: tl.constexpr,
    PADDED_J: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_LAST: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Of the tokens from `first` on, below `end`, whose partial logits lie where `place_of` says."""
    m, j = first + tl.arange(0, TOKENS), tl.arange(0, PADDED_J)
    e_GJ, ok_GJ = _numbers(E, J, PADDED_G, PADDED_J)
    if L > E:
        part_QMS = _parts(partials, m, tl.full([1], E, tl.int32), m < end, T, L, SPLITS)
    ok_GMJ = (m < end)[None, :, None] & ok_GJ[:, None, :]
    part_QGMJS = _parts(partials, m[None, :, None], e_GJ[:, None, :], ok_GMJ, T, L, SPLITS)
    logit_GMJ = tl.sum(tl.sum(part_QGMJS, 4), 0)
    if HAS_BIAS:
        logit_GMJ += bias_GJ[:, None, :]
    score_GMJ = _scores(logit_GMJ, ok_GJ, SCORES)
    rank_GMJ = score_GMJ
    if HAS_CORRECTION:
        rank_GMJ += correction_GJ[:, None, :]
    key_GMJ = tl.where(ok_GJ[:, None, :], ordered_32(rank_GMJ), LOWEST_32)
    if TOP_GROUPS < G:
        key_GMJ = _of_best_groups(key_GMJ, e_GJ, ok_GJ, G, TOP_GROUPS, GROUP_BEST)
    id_MJ, weight_MJ = _best(key_GMJ, score_GMJ, e_GJ, j, places, SCORES, HAS_CORRECTION, NORMED, LEAST_SUM, ADDED_SUM)
    weight_MJ *= SCALING
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
        logit_M = tl.sum(tl.sum(part_QMS, 2), 0)
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
def _best(
    key_GMJ, score_GMJ, e_GJ, j, places, SCORES: tl.constexpr, HAS_CORRECTION: tl.constexpr, NORMED: tl.constexpr,
    LEAST_SUM: tl.constexpr, ADDED_SUM: tl.constexpr,
):  # fmt: skip
    """(ids int32, weights) of the experts with the largest keys, [M, J] each, the best first; 0 from `places` on.

    Keys are the scores' own unless HAS_CORRECTION.  The compiler does not know `places`, so that the loop stays one: unrolled,
    its instructions are more than an SM fetches fast.  Each thread finds the best of its own experts, and its number, before
    the warp does; sums are added up on the way, for a reduction over lanes takes as long as a place.
    """
    id_MJ = tl.zeros([key_GMJ.shape[1], key_GMJ.shape[2]], tl.int32)
    weight_MJ = tl.zeros([key_GMJ.shape[1], key_GMJ.shape[2]], tl.float32)
    sum_M = tl.zeros([key_GMJ.shape[1]], tl.float32)
    first_M = tl.full([key_GMJ.shape[1]], -float("inf"), tl.float32)
    for place in tl.range(0, places, num_stages=1):
        key_MJ = tl.max(key_GMJ, 0)
        of_key_MJ = tl.min(tl.where(key_GMJ == key_MJ[None, :, :], e_GJ[:, None, :], NONE), 0)
        key_M = tl.max(key_MJ, 1)
        id_M = tl.min(tl.where(key_MJ == key_M[:, None], of_key_MJ, NONE), 1)
        is_best_GMJ = e_GJ[:, None, :] == id_M[None, :, None]
        key_GMJ = tl.where(is_best_GMJ, LOWEST_32, key_GMJ)
        if HAS_CORRECTION:  # bits of one number and zeros: the sum is exact, and one instruction for integers
            bits_GMJ = tl.where(is_best_GMJ, score_GMJ.to(tl.int32, bitcast=True), 0)
            weight_M = tl.sum(tl.sum(bits_GMJ, 0), 1).to(tl.float32, bitcast=True)
        else:
            weight_M = value_of_32(key_M)
        if SCORES == "softmax of chosen":
            first_M = tl.maximum(first_M, weight_M)  # which the first place's is
            weight_M = tl.exp(weight_M - first_M)
        sum_M += weight_M
        id_MJ = tl.where((j == place)[None, :], id_M[:, None], id_MJ)
        weight_MJ = tl.where((j == place)[None, :], weight_M[:, None], weight_MJ)
    if NORMED or SCORES == "softmax of chosen":
        if LEAST_SUM > 0:
            sum_M = tl.maximum(sum_M, LEAST_SUM)
        else:
            sum_M += ADDED_SUM
        weight_MJ /= sum_M[:, None]
    return id_MJ, weight_MJ


@triton.jit
def of_rule(bias, correction, RULE: tl.constexpr):
    """What `choose_all` reads of each expert: weights, so that it may be read before a wait.  [1, R, C] each."""
    RUNS: tl.constexpr = RULE.RUNS  # Triton 3.6 takes no field in place of a constexpr, here and below
    RUN: tl.constexpr = RULE.RUN
    e_RC = _in_runs(RUNS, RUN)
    found_RC = tl.zeros([RUNS, RUN], tl.float32)
    bias_RC = tl.load(bias + e_RC, mask=e_RC < RULE.E, other=0.0) if RULE.HAS_BIAS else found_RC
    correction_RC = tl.load(correction + e_RC, mask=e_RC < RULE.E, other=0.0) if RULE.HAS_CORRECTION else found_RC
    return bias_RC[None, :, :], correction_RC[None, :, :]


@triton.jit
def _in_runs(RUNS: tl.constexpr, RUN: tl.constexpr):
    return tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]


@triton.jit
def choose_all(parts, bias_1RC, correction_1RC, active, places, RULE: tl.constexpr, WARPS: tl.constexpr):
    """[C]: (numbers, weights) of the experts at the only token's places.

    places: as of `_best`; weights are right if they are all.
    Every warp chooses by itself, of a copy [W, ..] of the token: its lanes hold neighbouring experts, and a thread those of
    several runs, so that nothing passes through shared memory before the end.
    """
    RUNS: tl.constexpr = RULE.RUNS
    RUN: tl.constexpr = RULE.RUN
    PADDED_SPLITS: tl.constexpr = RULE.PADDED_SPLITS
    e_1RC, w = _in_runs(RUNS, RUN)[None, :, :], tl.arange(0, WARPS)
    s = tl.arange(0, PADDED_SPLITS)[None, :, None, None]
    at_WSRC = (w * 0)[:, None, None, None] + s * RULE.ROW + e_1RC[:, None, :, :]
    ok_WSRC = (w >= 0)[:, None, None, None] & (s < RULE.SPLITS) & (e_1RC < RULE.E)[:, None, :, :]
    part_WSRC = tl.load(parts + at_WSRC, mask=ok_WSRC, other=0.0, cache_modifier=".cg")  # this SM's L1 may hold old data
    score_WRC = tl.sum(part_WSRC, 1) + bias_1RC
    if RULE.SCORES == "sigmoid":
        score_WRC = 1 / (1 + tl.exp(-score_WRC))
    elif RULE.SCORES == "softmax":
        masked_WRC = tl.where(e_1RC < RULE.E, score_WRC, -float("inf"))
        part_WRC = tl.exp(masked_WRC - tl.max(tl.max(masked_WRC, 1), 1)[:, None, None])
        score_WRC = part_WRC * (1 / tl.sum(tl.sum(part_WRC, 1), 1))[:, None, None]
    key_WRC = tl.where(e_1RC < RULE.E, ordered_32(score_WRC + correction_1RC), LOWEST_32)
    c, number_WC, weight_WC = tl.arange(0, RUN), tl.zeros([WARPS, RUN], tl.int32), tl.zeros([WARPS, RUN], tl.float32)
    sum_W, first_W = tl.zeros([WARPS], tl.float32), tl.full([WARPS], -float("inf"), tl.float32)
    for at in tl.range(0, places, num_stages=1):
        key_WC = tl.max(key_WRC, 1)
        of_key_WC = tl.min(tl.where(key_WRC == key_WC[:, None, :], e_1RC, NONE), 1)
        key_W = tl.max(key_WC, 1)
        id_W = tl.min(tl.where(key_WC == key_W[:, None], of_key_WC, NONE), 1)
        is_best_WRC = e_1RC == id_W[:, None, None]
        key_WRC = tl.where(is_best_WRC, LOWEST_32, key_WRC)
        if RULE.HAS_CORRECTION:  # bits of one number and zeros, as in `_best`
            bits_WRC = tl.where(is_best_WRC, score_WRC.to(tl.int32, bitcast=True), 0)
            own_W = tl.sum(tl.sum(bits_WRC, 1), 1).to(tl.float32, bitcast=True)
        else:
            own_W = value_of_32(key_W)
        if RULE.SCORES == "softmax of chosen":
            first_W = tl.maximum(first_W, own_W)
            own_W = tl.exp(own_W - first_W)
        sum_W += own_W
        number_WC = tl.where((c == at)[None, :], id_W[:, None], number_WC)
        weight_WC = tl.where((c == at)[None, :], own_W[:, None], weight_WC)
    if RULE.NORMED or RULE.SCORES == "softmax of chosen":
        weight_WC /= (tl.maximum(sum_W, RULE.LEAST_SUM) if RULE.LEAST_SUM > 0 else sum_W + RULE.ADDED_SUM)[:, None]
    number_WC -= RULE.FIRST
    is_here_WC = (number_WC >= 0) & (number_WC < RULE.COUNT) & (c < places)[None, :]
    if RULE.HAS_ROWS:
        is_here_WC &= tl.load(active, cache_modifier=".cg") != 0
    is_first_WC = (w == 0)[:, None] & (c >= 0)[None, :]
    number_C = tl.sum(tl.where(is_first_WC, tl.where(is_here_WC, number_WC, RULE.COUNT), 0), 0)
    return number_C, tl.sum(tl.where(is_first_WC & is_here_WC, weight_WC * RULE.SCALING, 0.0), 0)


class ChoiceRule(NamedTuple):
    """What `choose_all`, and its like in Gluon, are told of a rule without groups, as constexprs.

    E experts are RUNS of at most RUN.  ROW: from one split's logits to the next one's.  FIRST, COUNT: experts that are here.
    HAS_ROWS: whether the token may be padding.
    """

    E: int
    RUNS: int
    RUN: int
    SPLITS: int
    PADDED_SPLITS: int
    ROW: int
    SCORES: str
    HAS_BIAS: bool
    HAS_CORRECTION: bool
    NORMED: bool
    LEAST_SUM: float
    ADDED_SUM: float
    SCALING: float
    FIRST: int
    COUNT: int
    HAS_ROWS: bool


class Choice(NamedTuple):
    """What a launch needs for `choose_and_store`.

    partials: float32, as `place_of` has them.  tensors: from bias to shared; what the rule lacks is another tensor.
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
    best, scores = rule.top_groups or groups, rule.scores
    if best == groups:  # of any experts: as many groups as make a warp's lanes hold one
        best = groups = triton.cdiv(experts, LANES)
        width = LANES
        if scores == "softmax" and rule.normed and not rule.corrected and not (rule.least_sum or rule.added_sum):
            scores = "softmax of chosen"  # the same numbers, without a sum over all experts
    else:
        width = experts // groups
    held, live = kept or (range(experts), None)
    assert live is None or T % len(live.active_B) == 0
    columns = T // len(live.active_B) if live else 1
    last_B = live.last_B if live and columns > 1 else None
    beside = 4 if splits > 2 else splits
    partials = torch.empty(triton.cdiv(splits, beside), T, L | 1, beside, dtype=torch.float32, device=device)
    topk_weights_TK = torch.empty(T, rule.top_k, dtype=torch.float32, device=device)
    topk_ids_TK = torch.empty(T, rule.top_k, dtype=torch.int64, device=device)
    shared_T1 = torch.empty(T, 1, dtype=torch.float32, device=device) if L > experts else None
    tensors = (
        partials if router.bias_E is None else router.bias_E, partials if router.correction_E is None else router.correction_E,
        live.active_B if live else topk_ids_TK, topk_ids_TK if last_B is None else last_B, topk_weights_TK, topk_ids_TK,
        partials if shared_T1 is None else shared_T1,
    )  # fmt: skip
    constants = dict(
        L=L, E=experts, G=groups, J=width, A=rule.top_k, SCORES=scores, HAS_BIAS=rule.biased,
        HAS_CORRECTION=rule.corrected, TOP_GROUPS=best, GROUP_BEST=rule.group_best, NORMED=rule.normed,
        LEAST_SUM=rule.least_sum, ADDED_SUM=rule.added, SCALING=rule.scaling, PADDED_G=power(groups),
        PADDED_J=max(power(width), power(rule.top_k)), FIRST=held.start, COUNT=len(held), COLUMNS=columns,
        HAS_ROWS=live is not None, HAS_LAST=last_B is not None,
    )  # fmt: skip
    return Choice(partials, tensors, constants, (topk_weights_TK, topk_ids_TK, shared_T1))


def unchosen_of(router: RouterWeights, rule: RouterRule, experts: int, splits: int, kept: Kept | None) -> Unchosen:
    """Of a single token, and a rule that `may_wait`; nothing is written yet."""
    from specdec.ops.products.routing import Unchosen

    device, (held, live) = router.weight_LH.device, kept or (range(experts), None)
    assert live is None or len(live.active_B) == 1
    row, padded = triton.cdiv(experts, 16) * 16, max(LANES, triton.next_power_of_2(experts))
    run = min(padded, 4 * LANES)
    form = ChoiceRule(
        E=experts, RUNS=padded // run, RUN=run, SPLITS=splits, PADDED_SPLITS=triton.next_power_of_2(splits), ROW=row,
        SCORES=rule.scores, HAS_BIAS=rule.biased, HAS_CORRECTION=rule.corrected, NORMED=rule.normed, LEAST_SUM=rule.least_sum,
        ADDED_SUM=rule.added, SCALING=rule.scaling, FIRST=held.start, COUNT=len(held), HAS_ROWS=live is not None,
    )  # fmt: skip
    if rule.scores == "softmax" and rule.normed and not (rule.corrected or rule.least_sum or rule.added_sum):
        form = form._replace(SCORES="softmax of chosen")  # the same numbers, without a sum over all experts
    parts = torch.empty(splits, row, dtype=torch.float32, device=device)
    weights_1K = torch.empty(1, rule.top_k, dtype=torch.float32, device=device)
    ids_1K = torch.empty(1, rule.top_k, dtype=torch.int64, device=device)
    bias, correction = (parts if each is None else each for each in (router.bias_E, router.correction_E))
    return Unchosen(parts, bias, correction, live.active_B if live else ids_1K, form, (weights_1K, ids_1K, None))


def read_of(choice: Unchosen | None, none: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What kernels read of a router's logits; `none` where they do not choose."""
    return (none, none, none, none) if choice is None else (choice.parts, choice.bias, choice.correction, choice.active)


def rule_of(choice: Unchosen | None) -> dict[str, Any]:
    """Their constexprs."""
    return {"CHOOSES": choice is not None, "RULE": None if choice is None else choice.rule}
