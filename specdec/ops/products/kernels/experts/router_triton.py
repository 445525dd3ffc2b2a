"""The kernel of a router of few tokens: logits, and each token's experts and their weights, in one launch (../../routing.py).

Programs share the logits: each multiplies some rows of the weight, and some columns of them, of which each warp has a part,
with a block of tokens, and sums in float32.  The program of a block that arrives last adds up the partial logits of all, in a
fixed order, and chooses (choosing_triton.py).  Until then everybody waits, so what weights the choice needs are read before
the wait.  Of a single token the experts' own kernels may choose instead (ROW > 0): nobody arrives then, and a split's logits
lie in a row of that length.

Order of chained launches (specdec/ops/launch.py): the kernel triggers before its wait, and reads weights alone before it.

Shapes: T tokens, M tokens of a program (OWN, padded), H hidden size, E experts, A experts of a token (top_k), L logits of a
token, N rows of the weight, S splits of the columns, B rows of the batch, C parts of a program's columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS, arrivals_of
from specdec.ops.products.kernels.experts.choosing_triton import (
    choice_of,
    choose_and_store,
    of_experts,
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
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_CK = tl.arange(0, WARPS)[:, None] * (BLOCK_K // WARPS) + tl.arange(0, BLOCK_K // WARPS)[None, :]
    k_CK += tl.program_id(1) * BLOCK_K
    ok_N, ok_CK = n < L, k_CK < H
    ok_CNK = ok_N[None, :, None] & ok_CK[:, None, :]
    w_CNK = tl.load(weight + n[None, :, None] * H + k_CK[:, None, :], mask=ok_CNK, other=0.0)
    if ROW == 0:
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
    ok_NM = ok_N[:, None] & (t < end)[None, :]
    if ROW > 0:  # of one token
        tl.store(partials + tl.program_id(1) * ROW + n[:, None] + t[None, :], logit_NM, mask=ok_NM)
    else:
        at_NM = place_of(tl.program_id(1), t[None, :], n[:, None], T, L, SPLITS)
        tl.store(partials + at_NM, logit_NM, mask=ok_NM)
        tl.debug_barrier()  # all of this program's stores before its arrival
        programs = tl.num_programs(0) * SPLITS
        mine = arrivals + tl.program_id(2) * APART
        if tl.atomic_add(mine, 1, sem="acq_rel") == programs - 1:
            tl.store(mine, 0)
            choose_and_store(
                partials, bias_GJ, correction_GJ, active, last, topk_weights, topk_ids, shared, first, end, T, places, L, E, G,
                J, A, SCORES, HAS_BIAS, HAS_CORRECTION, TOP_GROUPS, GROUP_BEST, NORMED, LEAST_SUM, ADDED_SUM, SCALING, PADDED_G,
                PADDED_J, FIRST, COUNT, COLUMNS, HAS_ROWS, HAS_LAST, SPLITS, TOKENS,
            )  # fmt: skip


def launch_router(
    x_TH: Tensor, router: RouterWeights, rule: RouterRule, experts: int, tiles: RouterTiles, kept: Kept | None
) -> Routed:
    """See `routing.routed`."""
    choice = choice_of(len(x_TH), router, rule, experts, _splits(x_TH, router, tiles), kept)
    _launch(x_TH, router, tiles, choice.partials, choice.tensors, rule.top_k, choice.constants)
    return choice.out


def launch_logits(
    x_1H: Tensor, router: RouterWeights, rule: RouterRule, experts: int, tiles: RouterTiles, kept: Kept | None
) -> Unchosen:
    """See `routing.unchosen`."""
    assert len(x_1H) == 1
    found = unchosen_of(router, rule, experts, _splits(x_1H, router, tiles), kept)
    one = choice_of(1, router, rule, experts, found.rule.SPLITS, None)  # of which nothing is read or written
    _launch(x_1H, router, tiles, found.parts, one.tensors, rule.top_k, one.constants | {"ROW": found.rule.ROW})
    return found


def _splits(x_TH: Tensor, router: RouterWeights, tiles: RouterTiles) -> int:
    return triton.cdiv(x_TH.shape[1], 2 * tiles.block_k // router.weight_LH.itemsize)


def _launch(
    x_TH: Tensor, router: RouterWeights, tiles: RouterTiles, partials: Tensor, tensors: tuple[Tensor, ...], top_k: int,
    constants: dict[str, Any],
) -> None:  # fmt: skip
    (T, H), L, own = x_TH.shape, router.weight_LH.shape[0], tiles.block_m
    assert x_TH.stride(1) == 1 and router.weight_LH.shape[1] == H
    splits, blocks = _splits(x_TH, router, tiles), triton.cdiv(T, own)
    assert blocks * APART.value <= ARRIVALS
    router_kernel[(triton.cdiv(L, tiles.block_n), splits, blocks)](
        x_TH, router.weight_LH, arrivals_of(x_TH.device), partials, *tensors, T, x_TH.stride(0), top_k, H=H,
        **{"ROW": 0, **constants}, SPLITS=splits, OWN=own, BLOCK_M=max(8, own),
        TOKENS=max(tiles.warps, min(own, triton.next_power_of_2(T))), BLOCK_N=tiles.block_n,
        BLOCK_K=2 * tiles.block_k // router.weight_LH.itemsize, WARPS=tiles.warps, num_warps=tiles.warps,
        **chained(x_TH.device),
    )  # fmt: skip
