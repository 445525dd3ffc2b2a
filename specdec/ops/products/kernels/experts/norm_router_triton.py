"""The kernel of a single token's router and of the norm in front of it, in one launch: what a layer adds, norms and routes.

Each program adds the residual stream and what the block before left, norms the sum, and multiplies the whole normed row with a
few rows of the router's weight, which it has loaded before its wait; the first one stores the sum and its norm.  So every
program reads the row, which lies in L2, and the launch of a norm is saved.  Experts are then chosen as router_triton.py's
kernel of one token does it, or by the experts' own kernels (CHOOSES is False).

Order of chained launches (specdec/ops/launch.py): the kernel triggers before its wait, and reads weights alone before it.

Shapes: H hidden size, E experts, A experts of a token (top_k), N rows of the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.norm_triton import row_of_product, terms_of
from specdec.ops.products.kernels.dense.stream_triton import arrivals_of
from specdec.ops.products.kernels.experts.choosing_triton import choose_all, of_rule, unchosen_of

if TYPE_CHECKING:
    from specdec.ops.products.own_pairs import Kept
    from specdec.ops.products.partials import Partials
    from specdec.ops.products.routing import RouterRule, RouterWeights, Unchosen


@triton.jit(do_not_specialize=["places"])
def norm_router_kernel(
    x,  # [1, H]
    delta,  # [1, H], or [PARTIALS, 1, H] float32
    norm,  # [H]
    weight,  # [E, H]
    arrivals,  # [ARRIVALS] int32, zero before and after
    parts,  # [1, ROW] float32
    bias,  # [E] float32
    correction,  # [E] float32
    active,  # [1] int32, if RULE.HAS_ROWS
    total,  # [1, H]
    normed,  # [1, H]
    topk_weights,  # [1, A] float32
    topk_ids,  # [1, A] int64
    stride_partial, eps,
    places,  # A
    H: tl.constexpr, PADDED: tl.constexpr, PARTIALS: tl.constexpr, PADDED_PARTIALS: tl.constexpr, E: tl.constexpr,
    RULE: tl.constexpr, CHOOSES: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, h = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PADDED)
    ok = h < H
    w_NH = tl.load(weight + n[:, None] * H + h[None, :], mask=(n < E)[:, None] & ok[None, :], other=0.0)
    norm_H = tl.load(norm + h, mask=ok, other=0.0).to(tl.float32)
    if CHOOSES:
        bias_1RC, correction_1RC = of_rule(bias, correction, RULE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + h, mask=ok, other=0.0)
    added = row_of_product(delta, h, ok, stride_partial, 1.0, value.dtype, PARTIALS, PADDED_PARTIALS, False)
    value = (value.to(tl.float32) + added).to(value.dtype)
    sum_H = value.to(tl.float32)
    row = (sum_H * tl.rsqrt(tl.sum(sum_H * sum_H, 0) / H + eps) * norm_H).to(value.dtype)
    if tl.program_id(0) == 0:
        tl.store(total + h, value, mask=ok)
        tl.store(normed + h, row, mask=ok)
    logit_N = tl.sum(w_NH.to(tl.float32) * row.to(tl.float32)[None, :], 1)
    tl.store(parts + n, logit_N, mask=n < E)
    if CHOOSES:
        tl.debug_barrier()  # all of this program's stores before its arrival
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(arrivals, 0)
            number_C, weight_C = choose_all(parts, bias_1RC, correction_1RC, active, places, RULE, WARPS)
            c = tl.arange(0, number_C.shape[0])
            tl.store(topk_ids + c, number_C.to(tl.int64), mask=c < places)
            tl.store(topk_weights + c, weight_C, mask=c < places)


BYTES, WARPS = 1 << 14, 4  # of a program's rows of the weight


def launch_norm_router(
    x_1H: Tensor, delta_1H: Tensor | Partials, norm_H: Tensor, eps: float, router: RouterWeights, rule: RouterRule,
    experts: int, kept: Kept | None, chooses: bool,
) -> tuple[Tensor, Tensor, Unchosen]:  # fmt: skip
    """(x + delta, its norm, what `routing.unchosen` gives); if it chooses, `out` is written."""
    H, weight_EH, delta = x_1H.shape[1], router.weight_LH, terms_of(delta_1H, x_1H)
    assert x_1H.shape[0] == 1 and x_1H.stride(1) == 1 and weight_EH.shape == (experts, H) and delta.times == 1
    found = unchosen_of(router, rule, experts, 1, kept)
    weights_1K, ids_1K, _ = found.out
    total_1H, normed_1H = (torch.empty(1, H, dtype=x_1H.dtype, device=x_1H.device) for _ in range(2))
    padded, partials = triton.next_power_of_2(H), len(delta.sums_SMN)
    rows = max(1, BYTES // (padded * weight_EH.itemsize))
    norm_router_kernel[(triton.cdiv(experts, rows),)](
        x_1H, delta.sums_SMN, norm_H, weight_EH, arrivals_of(x_1H.device), found.parts, found.bias, found.correction,
        found.active, total_1H, normed_1H, weights_1K, ids_1K, delta.sums_SMN.stride(0), eps, rule.top_k, H=H, PADDED=padded,
        PARTIALS=partials, PADDED_PARTIALS=triton.next_power_of_2(partials), E=experts, RULE=found.rule, CHOOSES=chooses,
        BLOCK_N=rows, WARPS=WARPS, num_warps=WARPS, **chained(x_1H.device),
    )  # fmt: skip
    return total_1H, normed_1H, found
