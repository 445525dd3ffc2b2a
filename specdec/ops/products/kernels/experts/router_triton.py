"""The kernel of a router of few tokens: logits, and each token's experts and their weights, in one launch (../../routing.py).

Programs share the logits: each multiplies some rows of the weight, and some columns of them, of which each warp has a part,
with a block of tokens, and sums in float32.  The program of a block that arrives last adds up the partial logits of all, in a
fixed order, and chooses.  Until it has chosen everybody waits, so it waits for memory once: what weights it needs are read
before the wait, a logit's partials lie side by side, so that a thread loads QUAD of them at once, and all are loaded by one
operation, because the compiler lets each load of several wait for the sum of those before.

A warp chooses a token's experts: its lanes hold neighbouring experts, each thread one of each group, so that a choice takes two
instructions for the whole warp and no shared memory.  Where the rule knows no groups, runs of 32 experts stand for them.

Keys order experts by rank (specdec/ops/topk_triton.py), NaN above all, and of equal ones the lower number is chosen; so every
id is an expert's, whatever the logits are.  Pairs that are computed elsewhere, or not at all, are skipped as own_pairs.py says.

Order of chained launches (specdec/ops/launch.py): the kernel triggers before its wait, and reads weights alone before it.

Shapes: T tokens, M tokens of a program (OWN, padded), H hidden size, E experts, A experts of a token (top_k), L logits of a
token, N rows of the weight, S splits of the columns, Q quads of them, B rows of the batch, G groups of J experts, C parts of a
program's columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS, arrivals_of
from specdec.ops.products.tiles.experts import RouterTiles
from specdec.ops.topk_triton import LOWEST_32, ordered_32, value_of_32

if TYPE_CHECKING:
    from specdec.ops.products.own_pairs import Kept
    from specdec.ops.products.routing import Routed, RouterRule, RouterWeights

LANES = 32  # of a warp
APART = tl.constexpr(8)  # counters of arrivals that lie in one sector of memory, of which one is used
NONE = tl.constexpr(2**31 - 1)  # above every expert's number
QUAD = 4  # numbers of 32 bits that one load brings a thread


@triton.jit(do_not_specialize=["T", "places"])
def router_kernel(
    x,  # [T, H]
    weight,  # [L, H]
    bias,  # [E] float32
    correction,  # [E] float32
    partials,  # [Q, T, L, QUAD] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    active,  # [B] int32, if HAS_ROWS
    last,  # [B] int64, if HAS_LAST
    topk_weights,  # [T, A] float32
    topk_ids,  # [T, A] int64
    shared,  # [T, 1] float32, if L is E + 1
    T, stride_x,
    places,  # A
    H: tl.constexpr, L: tl.constexpr, E: tl.constexpr, G: tl.constexpr, J: tl.constexpr, A: tl.constexpr,
    SCORES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, NORMED: tl.constexpr, LEAST_SUM: tl.constexpr, SCALING: tl.constexpr, PADDED_G: tl.constexpr,
    PADDED_J: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_LAST: tl.constexpr, SPLITS: tl.constexpr, QUAD: tl.constexpr, OWN: tl.constexpr, BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_CK = tl.arange(0, WARPS)[:, None] * (BLOCK_K // WARPS) + tl.arange(0, BLOCK_K // WARPS)[None, :]
    k_CK += tl.program_id(1) * BLOCK_K
    ok_N, ok_CK = n < L, k_CK < H
    ok_CNK = ok_N[None, :, None] & ok_CK[:, None, :]
    w_CNK = tl.load(weight + n[None, :, None] * H + k_CK[:, None, :], mask=ok_CNK, other=0.0)
    j = tl.arange(0, PADDED_J)
    e_GJ = tl.arange(0, PADDED_G)[:, None] * J + j[None, :]
    ok_GJ = (j < J)[None, :] & (e_GJ < E)
    e_GJ = tl.where(ok_GJ, e_GJ, NONE)
    if HAS_BIAS:
        bias_GJ = tl.load(bias + e_GJ, mask=ok_GJ, other=0.0)
    if HAS_CORRECTION:
        correction_GJ = tl.load(correction + e_GJ, mask=ok_GJ, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(2) * OWN
    end = tl.minimum(first + OWN, T)
    t = first + tl.arange(0, BLOCK_M)
    ok_CMK = (t < end)[None, :, None] & ok_CK[:, None, :]
    x_CMK = tl.load(x + t[None, :, None] * stride_x + k_CK[:, None, :], mask=ok_CMK, other=0.0)
    x_CKM = tl.permute(x_CMK, (0, 2, 1))
    if w_CNK.dtype == x_CKM.dtype and w_CNK.dtype != tl.float32:
        logit_CNM = tl.dot(w_CNK, x_CKM)
    else:  # three products of the tensor cores, with nearly all bits of float32
        logit_CNM = tl.dot(w_CNK.to(tl.float32), x_CKM.to(tl.float32), input_precision="tf32x3")
    logit_NM = tl.sum(logit_CNM, 0)
    split = tl.program_id(1)
    at_NM = ((split // QUAD * T + t)[None, :] * L + n[:, None]) * QUAD + split % QUAD
    tl.store(partials + at_NM, logit_NM, mask=ok_N[:, None] & (t < end)[None, :])
    tl.debug_barrier()  # all of this program's stores before its arrival
    programs = tl.num_programs(0) * SPLITS
    mine = arrivals + tl.program_id(2) * APART
    if tl.atomic_add(mine, 1, sem="acq_rel") == programs - 1:
        tl.store(mine, 0)
        m = first + tl.arange(0, TOKENS)
        ok_GMJ = (m < end)[None, :, None] & ok_GJ[:, None, :]
        if L > E:
            part_QMS = _parts(partials, m * L + E, m < end, T * L, SPLITS, QUAD)
        part_QGMJS = _parts(partials, m[None, :, None] * L + e_GJ[:, None, :], ok_GMJ, T * L, SPLITS, QUAD)
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
        id_MJ, weight_MJ = _best(key_GMJ, score_GMJ, e_GJ, j, places, SCORES, HAS_CORRECTION, NORMED, LEAST_SUM)
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
def _parts(partials, at, ok, size, SPLITS: tl.constexpr, QUAD: tl.constexpr):
    """The partials [Q, .., QUAD] of these logits.  size: how many logits there are.

    From L2 (.cg), since this SM's L1 may hold old data.
    """
    QUADS: tl.constexpr = (SPLITS + QUAD - 1) // QUAD
    PADDED: tl.constexpr = triton.next_power_of_2(QUADS)
    q, s = tl.arange(0, PADDED), tl.arange(0, QUAD)
    for _ in tl.static_range(len(at.shape)):
        q = tl.expand_dims(q, -1)
    at, ok, q = tl.expand_dims(tl.expand_dims(at, 0), -1), tl.expand_dims(tl.expand_dims(ok, 0), -1), tl.expand_dims(q, -1)
    ok = ok & (q * QUAD + s < SPLITS)
    return tl.load(partials + (q * size + at) * QUAD + s, mask=ok, other=0.0, cache_modifier=".cg")


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
    LEAST_SUM: tl.constexpr,
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
        elif SCORES == "sigmoid":  # each of which may be 0
            sum_M += 1e-20
        weight_MJ /= sum_M[:, None]
    return id_MJ, weight_MJ


def launch_router(
    x_TH: Tensor, router: RouterWeights, rule: RouterRule, experts: int, tiles: RouterTiles, kept: Kept | None
) -> Routed:
    """See `routing.routed`."""
    (T, H), L, device = x_TH.shape, router.weight_LH.shape[0], x_TH.device
    assert T and x_TH.stride(1) == 1 and router.weight_LH.shape[1] == H and L - experts in (0, 1)
    assert rule.biased == (router.bias_E is not None) and rule.corrected == (router.correction_E is not None)
    groups, power, own = rule.groups or 1, triton.next_power_of_2, tiles.block_m
    assert experts % groups == 0 and rule.top_k <= experts
    best = rule.top_groups or groups
    scores = rule.scores
    if best == groups:  # of any experts: as many groups as make a warp's lanes hold one
        best = groups = triton.cdiv(experts, LANES)
        width = LANES
        if scores == "softmax" and rule.normed and not rule.corrected and not rule.least_sum:
            scores = "softmax of chosen"  # the same numbers, without a sum over all experts
    else:
        width = experts // groups
    block_k = 2 * tiles.block_k // router.weight_LH.itemsize
    splits, blocks = triton.cdiv(H, block_k), triton.cdiv(T, own)
    assert blocks * APART.value <= ARRIVALS
    held, live = kept or (range(experts), None)
    assert live is None or T % len(live.active_B) == 0
    columns = T // len(live.active_B) if live else 1
    last_B = live.last_B if live and columns > 1 else None
    partials = torch.empty(triton.cdiv(splits, QUAD), T, L, QUAD, dtype=torch.float32, device=device)
    topk_weights_TK = torch.empty(T, rule.top_k, dtype=torch.float32, device=device)
    topk_ids_TK = torch.empty(T, rule.top_k, dtype=torch.int64, device=device)
    shared_T1 = torch.empty(T, 1, dtype=torch.float32, device=device) if L > experts else None
    router_kernel[(triton.cdiv(L, tiles.block_n), splits, blocks)](
        x_TH, router.weight_LH, x_TH if router.bias_E is None else router.bias_E,
        x_TH if router.correction_E is None else router.correction_E, partials, arrivals_of(device),
        live.active_B if live else topk_ids_TK, topk_ids_TK if last_B is None else last_B, topk_weights_TK,
        topk_ids_TK, partials if shared_T1 is None else shared_T1, T, x_TH.stride(0), rule.top_k, H=H, L=L, E=experts,
        G=groups, J=width, A=rule.top_k, SCORES=scores, HAS_BIAS=rule.biased, HAS_CORRECTION=rule.corrected,
        TOP_GROUPS=best, GROUP_BEST=rule.group_best, NORMED=rule.normed, LEAST_SUM=rule.least_sum, SCALING=rule.scaling,
        PADDED_G=power(groups), PADDED_J=max(power(width), power(rule.top_k)), FIRST=held.start, COUNT=len(held),
        COLUMNS=columns, HAS_ROWS=live is not None, HAS_LAST=last_B is not None, SPLITS=splits, QUAD=QUAD, OWN=own,
        BLOCK_M=max(8, own), TOKENS=max(tiles.warps, min(own, power(T))), BLOCK_N=tiles.block_n, BLOCK_K=block_k,
        WARPS=tiles.warps, num_warps=tiles.warps, **chained(device),
    )  # fmt: skip
    return topk_weights_TK, topk_ids_TK, shared_T1
