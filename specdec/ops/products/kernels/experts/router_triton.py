"""The kernels of a router of few tokens: logits, and each token's experts and their weights, in one launch (../../routing.py).

Programs share the logits: each multiplies some rows of the weight, and some columns of them, of which each warp has a part,
with a block of tokens, and sums in float32.  The program of a block that arrives last adds up the partial logits of all, in a
fixed order, and chooses (choosing_triton.py).  Until then everybody waits, so what weights the choice needs are read before
the wait.

A single token has a kernel of its own, if its rule ranks no groups: a warp multiplies rows of the weight without tensor cores,
and so passes nothing through shared memory; `choose_all` chooses.  Or the experts' own kernels do (CHOOSES is False), and then
nobody arrives.

Order of chained launches (specdec/ops/launch.py): both kernels trigger before their wait, and read weights alone before it.

Shapes: T tokens, M tokens of a program (OWN, padded), H hidden size, E experts, A experts of a token (top_k), L logits of a
token, N rows of the weight, S splits of the columns, B rows of the batch, C parts of a program's columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS, arrivals_of
from specdec.ops.products.kernels.experts.choosing_triton import (
    choice_of,
    choose_all,
    choose_and_store,
    of_experts,
    of_rule,
    place_of,
    unchosen_of,
)
from specdec.ops.products.tiles.experts import RouterTiles

if TYPE_CHECKING:
    from specdec.ops.products.own_pairs import Kept
    from specdec.ops.products.routing import Routed, RouterRule, RouterWeights, Unchosen

APART = tl.constexpr(8)  # counters of arrivals that lie in one sector of memory, of which one is used


@triton.jit(do_not_specialize=["T", "places"])
def router_kernel(
    x,  # [T, H]
    weight,  # [L, H]
    arrivals,  # [ARRIVALS] int32, zero before and after
    partials,  # float32: see `place_of`
    bias,  # [E] float32
    correction,  # [E] float32
    active,  # [B] int32, if HAS_ROWS
    last,  # [B] int64, if HAS_LAST
    topk_weights,  # [T, A] float32
    topk_ids,  # [T, A] int64
    shared,  # [T, 1] float32, if L is E + 1
    T, stride_x,
    places,  # A
    H: tl.constexpr, L: tl.constexpr, E: tl.constexpr, G: tl.constexpr, J: tl.constexpr, A: tl.constexpr,
    SCORES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, NORMED: tl.constexpr, LEAST_SUM: tl.constexpr, ADDED_SUM: tl.constexpr, SCALING: tl.constexpr,
    PADDED_G: tl.constexpr, PADDED_J: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_LAST: tl.constexpr, SPLITS: tl.constexpr, OWN: tl.constexpr, BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_CK = tl.arange(0, WARPS)[:, None] * (BLOCK_K // WARPS) + tl.arange(0, BLOCK_K // WARPS)[None, :]
    k_CK += tl.program_id(1) * BLOCK_K
    ok_N, ok_CK = n < L, k_CK < H
    ok_CNK = ok_N[None, :, None] & ok_CK[:, None, :]
    w_CNK = tl.load(weight + n[None, :, None] * H + k_CK[:, None, :], mask=ok_CNK, other=0.0)
    bias_GJ = of_experts(bias, HAS_BIAS, E, J, PADDED_G, PADDED_J)
    correction_GJ = of_experts(correction, HAS_CORRECTION, E, J, PADDED_G, PADDED_J)
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
    at_NM = place_of(tl.program_id(1), t[None, :], n[:, None], T, L, SPLITS)
    tl.store(partials + at_NM, logit_NM, mask=ok_N[:, None] & (t < end)[None, :])
    tl.debug_barrier()  # all of this program's stores before its arrival
    programs = tl.num_programs(0) * SPLITS
    mine = arrivals + tl.program_id(2) * APART
    if tl.atomic_add(mine, 1, sem="acq_rel") == programs - 1:
        tl.store(mine, 0)
        choose_and_store(
            partials, bias_GJ, correction_GJ, active, last, topk_weights, topk_ids, shared, first, end, T, places, L, E, G, J,
            A, SCORES, HAS_BIAS, HAS_CORRECTION, TOP_GROUPS, GROUP_BEST, NORMED, LEAST_SUM, ADDED_SUM, SCALING, PADDED_G,
            PADDED_J, FIRST, COUNT, COLUMNS, HAS_ROWS, HAS_LAST, SPLITS, TOKENS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["places"])
def router_one_kernel(
    x,  # [1, H]
    weight,  # [E, H]
    arrivals,  # [ARRIVALS] int32, zero before and after
    parts,  # [SPLITS, ROW] float32
    bias,  # [E] float32
    correction,  # [E] float32
    active,  # [1] int32, if RULE.HAS_ROWS
    topk_weights,  # [1, A] float32
    topk_ids,  # [1, A] int64
    places,  # A
    H: tl.constexpr, E: tl.constexpr, RULE: tl.constexpr, CHOOSES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    ok_NK = (n < E)[:, None] & (k < H)[None, :]
    w_NK = tl.load(weight + n[:, None] * H + k[None, :], mask=ok_NK, other=0.0)
    if CHOOSES:
        bias_1RC, correction_1RC = of_rule(bias, correction, RULE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_NK = tl.load(x + (n * 0)[:, None] + k[None, :], mask=ok_NK, other=0.0)  # by each warp, as its rows lie
    logit_N = tl.sum(w_NK.to(tl.float32) * x_NK.to(tl.float32), 1)
    tl.store(parts + tl.program_id(1) * RULE.ROW + n, logit_N, mask=n < E)
    if CHOOSES:
        tl.debug_barrier()  # all of this program's stores before its arrival
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1:
            tl.store(arrivals, 0)
            number_C, weight_C = choose_all(parts, bias_1RC, correction_1RC, active, places, RULE, WARPS)
            c = tl.arange(0, number_C.shape[0])
            tl.store(topk_ids + c, number_C.to(tl.int64), mask=c < places)
            tl.store(topk_weights + c, weight_C, mask=c < places)


def launch_router(
    x_TH: Tensor, router: RouterWeights, rule: RouterRule, experts: int, tiles: RouterTiles, kept: Kept | None
) -> Routed:
    """See `routing.routed`."""
    (T, H), L, own = x_TH.shape, router.weight_LH.shape[0], tiles.block_m
    assert x_TH.stride(1) == 1 and router.weight_LH.shape[1] == H
    block_k = 2 * tiles.block_k // router.weight_LH.itemsize
    splits, blocks = triton.cdiv(H, block_k), triton.cdiv(T, own)
    assert blocks * APART.value <= ARRIVALS
    choice = choice_of(T, router, rule, experts, splits, kept)
    router_kernel[(triton.cdiv(L, tiles.block_n), splits, blocks)](
        x_TH, router.weight_LH, arrivals_of(x_TH.device), choice.partials, *choice.tensors, T, x_TH.stride(0), rule.top_k, H=H,
        **choice.constants, SPLITS=splits, OWN=own, BLOCK_M=max(8, own),
        TOKENS=max(tiles.warps, min(own, triton.next_power_of_2(T))), BLOCK_N=tiles.block_n, BLOCK_K=block_k,
        WARPS=tiles.warps, num_warps=tiles.warps, **chained(x_TH.device),
    )  # fmt: skip
    return choice.out


ONE_N, ONE_K, ONE_WARPS = 8, 1024, 4  # rows and columns of a program's part of the weight


def launch_router_one(
    x_1H: Tensor, router: RouterWeights, rule: RouterRule, experts: int, kept: Kept | None, chooses: bool
) -> Unchosen:
    """See `routing.unchosen`; if it chooses, `out` is written."""
    H, splits = x_1H.shape[1], triton.cdiv(x_1H.shape[1], ONE_K)
    assert x_1H.shape[0] == 1 and x_1H.stride(1) == 1 and router.weight_LH.shape == (experts, H)
    found = unchosen_of(router, rule, experts, splits, kept)
    weights_1K, ids_1K, _ = found.out
    router_one_kernel[(triton.cdiv(experts, ONE_N), splits)](
        x_1H, router.weight_LH, arrivals_of(x_1H.device), found.parts, found.bias, found.correction, found.active, weights_1K,
        ids_1K, rule.top_k, H=H, E=experts, RULE=found.rule, CHOOSES=chooses, BLOCK_N=ONE_N, BLOCK_K=ONE_K, WARPS=ONE_WARPS,
        num_warps=ONE_WARPS, **chained(x_1H.device),
    )  # fmt: skip
    return found
