"""The kernel of a router of few tokens: logits, and each token's experts and their weights, in one launch (../../routing.py).

Programs share the logits: each multiplies some rows of the weight, and some columns of them, with a block of tokens, and sums
in float32.  The program of a block that arrives last adds up the partial logits of all, in a fixed order, and chooses.

Keys order experts by rank, and then by lower number (specdec/ops/topk_triton.py), so that they never tie; NaN counts as larger
than all, and every id is an expert's, whatever the logits are.  Pairs that are computed elsewhere, or not at all, are skipped
as own_pairs.py says.

Order of chained launches (specdec/ops/launch.py): the kernel triggers before its wait, and reads weights alone before it.

Shapes: T tokens, M tokens of a program, H hidden size, E experts, A experts of a token (top_k), L logits of a token, N rows of
the weight, S splits of the columns, B rows of the batch; E = G groups of J.
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
from specdec.ops.topk_triton import LOWEST_64, key_index, key_value, make_key

if TYPE_CHECKING:
    from specdec.ops.products.own_pairs import Kept
    from specdec.ops.products.routing import Routed, RouterRule, RouterWeights


@triton.jit(do_not_specialize=["T"])
def router_kernel(
    x,  # [T, H]
    weight,  # [L, H]
    bias,  # [E] float32
    correction,  # [E] float32
    partials,  # [S, T, L] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    active,  # [B] int32, if HAS_ROWS
    last,  # [B] int64, if HAS_LAST
    topk_weights,  # [T, A] float32
    topk_ids,  # [T, A] int64
    shared,  # [T, 1] float32, if L is E + 1
    T, stride_x,
    H: tl.constexpr, L: tl.constexpr, G: tl.constexpr, J: tl.constexpr, A: tl.constexpr, SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    NORMED: tl.constexpr, LEAST_SUM: tl.constexpr, SCALING: tl.constexpr, PADDED_G: tl.constexpr, PADDED_J: tl.constexpr,
    PADDED_A: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_LAST: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    ok_N, ok_K = n < L, k < H
    w_NK = tl.load(weight + n[:, None] * H + k[None, :], mask=ok_N[:, None] & ok_K[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(2) * BLOCK_M
    t = first + tl.arange(0, BLOCK_M)
    x_MK = tl.load(x + t[:, None] * stride_x + k[None, :], mask=(t < T)[:, None] & ok_K[None, :], other=0.0)
    if w_NK.dtype == x_MK.dtype and w_NK.dtype != tl.float32:
        logit_NM = tl.dot(w_NK, tl.trans(x_MK))
    else:  # three products of the tensor cores, with nearly all bits of float32
        logit_NM = tl.dot(w_NK.to(tl.float32), tl.trans(x_MK.to(tl.float32)), input_precision="tf32x3")
    at_NM = (tl.program_id(1) * T + t)[None, :] * L + n[:, None]
    tl.store(partials + at_NM, logit_NM, mask=ok_N[:, None] & (t < T)[None, :])
    tl.debug_barrier()  # all of this program's stores before its arrival
    programs = tl.num_programs(0) * SPLITS
    if tl.atomic_add(arrivals + tl.program_id(2), 1, sem="acq_rel") == programs - 1:
        tl.store(arrivals + tl.program_id(2), 0)
        m = first + tl.arange(0, TOKENS)
        e_GJ = tl.arange(0, PADDED_G)[:, None] * J + tl.arange(0, PADDED_J)[None, :]
        ok_GJ = (tl.arange(0, PADDED_G) < G)[:, None] & (tl.arange(0, PADDED_J) < J)[None, :]
        ok_MGJ = (m < T)[:, None, None] & ok_GJ[None, :, :]
        at_MGJ = m[:, None, None] * L + e_GJ[None, :, :]
        logit_MGJ = tl.zeros([TOKENS, PADDED_G, PADDED_J], tl.float32)
        for s in tl.static_range(SPLITS):  # from L2 (.cg), since this SM's L1 may hold old data
            logit_MGJ += tl.load(partials + s * T * L + at_MGJ, mask=ok_MGJ, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            logit_MGJ += tl.load(bias + e_GJ, mask=ok_GJ, other=0.0)[None, :, :]
        score_MGJ = _scores(logit_MGJ, ok_GJ, SCORES)
        rank_MGJ = score_MGJ
        if HAS_CORRECTION:
            rank_MGJ += tl.load(correction + e_GJ, mask=ok_GJ, other=0.0)[None, :, :]
        if TOP_GROUPS < G:
            rank_MGJ = _of_best_groups(rank_MGJ, e_GJ, ok_GJ, G, PADDED_G, TOP_GROUPS, GROUP_BEST)
        key_MGJ = tl.where(ok_GJ[None, :, :], make_key(rank_MGJ, e_GJ[None, :, :]), LOWEST_64)
        id_MA, weight_MA = _best(key_MGJ, score_MGJ, A, PADDED_A)
        a = tl.arange(0, PADDED_A)
        weight_MA = _weights(weight_MA, (a < A)[None, :], SCORES, NORMED, LEAST_SUM) * SCALING
        id_MA -= FIRST
        ok_MA = (m < T)[:, None] & (a < A)[None, :]
        keeps_MA = ok_MA & (id_MA >= 0) & (id_MA < COUNT)
        if HAS_ROWS:
            keeps_MA &= (tl.load(active + m // COLUMNS, mask=m < T, other=0) != 0)[:, None]
            if HAS_LAST:
                keeps_MA &= (m % COLUMNS <= tl.load(last + m // COLUMNS, mask=m < T, other=0))[:, None]
        id_MA, weight_MA = tl.where(keeps_MA, id_MA, COUNT), tl.where(keeps_MA, weight_MA, 0.0)
        tl.store(topk_weights + m[:, None] * A + a[None, :], weight_MA, mask=ok_MA)
        tl.store(topk_ids + m[:, None] * A + a[None, :], id_MA.to(tl.int64), mask=ok_MA)
        if L > G * J:
            logit_M = tl.zeros([TOKENS], tl.float32)
            for s in tl.static_range(SPLITS):
                logit_M += tl.load(partials + (s * T + m) * L + G * J, mask=m < T, other=0.0, cache_modifier=".cg")
            tl.store(shared + m, 1 / (1 + tl.exp(-logit_M)), mask=m < T)


@triton.jit
def _scores(logit_MGJ, ok_GJ, SCORES: tl.constexpr):
    """The softmax over a token's experts, the sigmoid of each, or the logits themselves."""
    if SCORES == "sigmoid":
        logit_MGJ = 1 / (1 + tl.exp(-logit_MGJ))
    elif SCORES == "softmax":
        peak_M = tl.max(tl.max(tl.where(ok_GJ[None, :, :], logit_MGJ, -float("inf")), 2), 1)
        part_MGJ = tl.where(ok_GJ[None, :, :], tl.exp(logit_MGJ - peak_M[:, None, None]), 0.0)
        logit_MGJ = part_MGJ / tl.sum(tl.sum(part_MGJ, 2), 1)[:, None, None]
    return logit_MGJ


@triton.jit
def _of_best_groups(
    rank_MGJ, e_GJ, ok_GJ, G: tl.constexpr, PADDED_G: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr
):  # fmt: skip
    """The ranks, with -inf in place of those of all but the token's best groups."""
    lowest = tl.full([], LOWEST_64, tl.int64)
    key_MGJ = tl.where(ok_GJ[None, :, :], make_key(rank_MGJ, e_GJ[None, :, :]), lowest)
    sum_MG = tl.zeros([rank_MGJ.shape[0], PADDED_G], tl.float32)
    for _ in tl.static_range(GROUP_BEST):
        best_MG = tl.max(key_MGJ, 2)
        sum_MG += key_value(best_MG)
        key_MGJ = tl.where(key_MGJ == best_MG[:, :, None], lowest, key_MGJ)
    g = tl.arange(0, PADDED_G)
    key_MG = tl.where((g < G)[None, :], make_key(sum_MG, g[None, :]), lowest)
    for _ in tl.static_range(TOP_GROUPS):
        key_MG = tl.where(key_MG == tl.max(key_MG, 1)[:, None], lowest, key_MG)
    return tl.where((key_MG == lowest)[:, :, None], rank_MGJ, -float("inf"))


@triton.jit
def _best(key_MGJ, score_MGJ, A: tl.constexpr, PADDED_A: tl.constexpr):
    """(ids int32, scores) of the experts with the largest keys, [M, A] each, the best first; 0 beyond A."""
    lowest = tl.full([], LOWEST_64, tl.int64)
    a = tl.arange(0, PADDED_A)
    id_MA = tl.zeros([key_MGJ.shape[0], PADDED_A], tl.int32)
    best_MA = tl.zeros([key_MGJ.shape[0], PADDED_A], tl.float32)
    for place in tl.static_range(A):
        key_M = tl.max(tl.max(key_MGJ, 2), 1)
        is_best_MGJ = key_MGJ == key_M[:, None, None]
        score_M = tl.sum(tl.sum(tl.where(is_best_MGJ, score_MGJ, 0.0), 2), 1)
        key_MGJ = tl.where(is_best_MGJ, lowest, key_MGJ)
        id_MA = tl.where((a == place)[None, :], key_index(key_M)[:, None], id_MA)
        best_MA = tl.where((a == place)[None, :], score_M[:, None], best_MA)
    return id_MA, best_MA


@triton.jit
def _weights(score_MA, ok_MA, SCORES: tl.constexpr, NORMED: tl.constexpr, LEAST_SUM: tl.constexpr):
    """What the scores of a token's experts weigh, before they are scaled."""
    if SCORES == "softmax of chosen":
        known_MA = tl.where(ok_MA, score_MA, -float("inf"))
        part_MA = tl.exp(known_MA - tl.max(known_MA, 1)[:, None])
        score_MA = part_MA / tl.sum(part_MA, 1)[:, None]
    elif NORMED:
        sum_M = tl.sum(score_MA, 1)
        if LEAST_SUM > 0:
            sum_M = tl.maximum(sum_M, LEAST_SUM)
        elif SCORES == "sigmoid":  # each of which may be 0
            sum_M += 1e-20
        score_MA = score_MA / sum_M[:, None]
    return score_MA


def launch_router(
    x_TH: Tensor, router: RouterWeights, rule: RouterRule, experts: int, tiles: RouterTiles, kept: Kept | None
) -> Routed:
    """See `routing.routed`."""
    (T, H), L, device = x_TH.shape, router.weight_LH.shape[0], x_TH.device
    assert T and x_TH.stride(1) == 1 and router.weight_LH.shape[1] == H and L - experts in (0, 1)
    assert rule.biased == (router.bias_E is not None) and rule.corrected == (router.correction_E is not None)
    groups, power, block_m = rule.groups or 1, triton.next_power_of_2, tiles.block_m
    assert experts % groups == 0 and rule.top_k <= experts
    block_k = 2 * tiles.block_k // router.weight_LH.itemsize
    splits, blocks = triton.cdiv(H, block_k), triton.cdiv(T, block_m)
    assert blocks <= ARRIVALS
    own, live = kept or (range(experts), None)
    assert live is None or T % len(live.active_B) == 0
    columns = T // len(live.active_B) if live else 1
    last_B = live.last_B if live and columns > 1 else None
    partials = torch.empty(splits, T, L, dtype=torch.float32, device=device)
    topk_weights_TK = torch.empty(T, rule.top_k, dtype=torch.float32, device=device)
    topk_ids_TK = torch.empty(T, rule.top_k, dtype=torch.int64, device=device)
    shared_T1 = torch.empty(T, 1, dtype=torch.float32, device=device) if L > experts else None
    router_kernel[(triton.cdiv(L, tiles.block_n), splits, blocks)](
        x_TH, router.weight_LH, x_TH if router.bias_E is None else router.bias_E,
        x_TH if router.correction_E is None else router.correction_E, partials, arrivals_of(device),
        live.active_B if live else topk_ids_TK, topk_ids_TK if last_B is None else last_B, topk_weights_TK,
        topk_ids_TK, partials if shared_T1 is None else shared_T1, T, x_TH.stride(0), H=H, L=L, G=groups,
        J=experts // groups, A=rule.top_k, SCORES=rule.scores, HAS_BIAS=rule.biased, HAS_CORRECTION=rule.corrected,
        TOP_GROUPS=rule.top_groups or 1, GROUP_BEST=rule.group_best, NORMED=rule.normed, LEAST_SUM=rule.least_sum,
        SCALING=rule.scaling, PADDED_G=power(groups), PADDED_J=power(experts // groups), PADDED_A=power(rule.top_k),
        FIRST=own.start, COUNT=len(own), COLUMNS=columns, HAS_ROWS=live is not None, HAS_LAST=last_B is not None,
        SPLITS=splits, BLOCK_M=block_m, TOKENS=min(block_m, power(T)), BLOCK_N=tiles.block_n, BLOCK_K=block_k,
        num_warps=tiles.warps, **chained(device),
    )  # fmt: skip
    return topk_weights_TK, topk_ids_TK, shared_T1
