"""The kernel of a router of many tokens: logits, and each token's experts and their weights, in one launch (../../routing.py).

A program multiplies its tokens with the whole weight, column by column, and sums in float32.  It writes the logits to memory,
where they stay in L2, because a choice wants them distributed otherwise than the tensor cores leave them (choosing_triton.py).

Order of chained launches (specdec/ops/launch.py): the kernel reads nothing before its wait, and triggers after it.

Shapes: T tokens, M tokens of a program, H hidden size, E experts, A experts of a token (top_k), L logits of a token, N rows of
the weight, K columns of a step, B rows of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.kernels.experts.choosing_triton import choice_of, choose_and_store, of_experts
from specdec.ops.products.tiles.experts import ManyRouterTiles

if TYPE_CHECKING:
    from specdec.ops.products.own_pairs import Kept
    from specdec.ops.products.routing import Routed, RouterRule, RouterWeights


@triton.jit(do_not_specialize=["T", "places"])
def router_many_kernel(
    x,  # [T, H]
    weight,  # [L, H]
    logits,  # [T, L | 1] float32
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
    HAS_ROWS: tl.constexpr, HAS_LAST: tl.constexpr, PADDED_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_M
    t, n = first + tl.arange(0, BLOCK_M), tl.arange(0, PADDED_E)
    ok_M = t < T
    x_M = x + t.to(tl.int64) * stride_x
    weight_N = weight + tl.where(n < E, n, 0) * H
    acc_MN = tl.zeros([BLOCK_M, PADDED_E], tl.float32)
    for start in tl.range(0, H, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        ok_K = k < H
        x_MK = tl.load(x_M[:, None] + k[None, :], mask=ok_M[:, None] & ok_K[None, :], other=0.0)
        if H % BLOCK_K == 0:
            w_NK = tl.load(weight_N[:, None] + k[None, :])
        else:
            w_NK = tl.load(weight_N[:, None] + k[None, :], mask=(n < E)[:, None] & ok_K[None, :], other=0.0)
        if w_NK.dtype == x_MK.dtype and w_NK.dtype != tl.float32:
            acc_MN = tl.dot(x_MK, tl.trans(w_NK), acc_MN)
        else:  # three products of the tensor cores, with nearly all bits of float32
            acc_MN = tl.dot(x_MK.to(tl.float32), tl.trans(w_NK.to(tl.float32)), acc_MN, input_precision="tf32x3")
    ROW: tl.constexpr = L | 1
    tl.store(logits + (t * ROW)[:, None] + n[None, :], acc_MN, mask=ok_M[:, None] & (n < E)[None, :])
    if L > E:  # one row more, for which the tensor cores would take many
        sum_M = tl.zeros([BLOCK_M], tl.float32)
        for start in tl.range(0, H, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x_MK = tl.load(x_M[:, None] + k[None, :], mask=ok_M[:, None] & (k < H)[None, :], other=0.0).to(tl.float32)
            w_K = tl.load(weight + E * H + k, mask=k < H, other=0.0).to(tl.float32)
            sum_M += tl.sum(x_MK * w_K[None, :], 1)
        tl.store(logits + t * ROW + E, sum_M, mask=ok_M)
    tl.debug_barrier()  # all of this program's stores before its loads
    bias_GJ = of_experts(bias, HAS_BIAS, E, J, PADDED_G, PADDED_J)
    correction_GJ = of_experts(correction, HAS_CORRECTION, E, J, PADDED_G, PADDED_J)
    choose_and_store(
        logits, bias_GJ, correction_GJ, active, last, topk_weights, topk_ids, shared, first, tl.minimum(first + BLOCK_M, T), T,
        places, L, E, G, J, A, SCORES, HAS_BIAS, HAS_CORRECTION, TOP_GROUPS, GROUP_BEST, NORMED, LEAST_SUM, ADDED_SUM, SCALING,
        PADDED_G, PADDED_J, FIRST, COUNT, COLUMNS, HAS_ROWS, HAS_LAST, 1, BLOCK_M,
    )  # fmt: skip


def launch_router_many(
    x_TH: Tensor, router: RouterWeights, rule: RouterRule, experts: int, tiles: ManyRouterTiles, kept: Kept | None
) -> Routed:
    """See `routing.routed`."""
    (T, H), choice = x_TH.shape, choice_of(len(x_TH), router, rule, experts, 1, kept)
    assert x_TH.stride(1) == 1 and router.weight_LH.shape[1] == H and T * (len(router.weight_LH) | 1) < 1 << 31
    router_many_kernel[(triton.cdiv(T, tiles.block_m),)](
        x_TH, router.weight_LH, choice.partials, *choice.tensors, T, x_TH.stride(0), rule.top_k, H=H, **choice.constants,
        PADDED_E=max(16, triton.next_power_of_2(experts)), BLOCK_M=tiles.block_m,
        BLOCK_K=2 * tiles.block_k // router.weight_LH.itemsize, STAGES=tiles.stages, num_warps=tiles.warps,
        num_stages=tiles.stages, **chained(x_TH.device),
    )  # fmt: skip
    return choice.out
