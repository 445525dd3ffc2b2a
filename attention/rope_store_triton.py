"""The kernel between projection and attention: q/k norm, rotary positions, and keys and values into their slots.

`specdec.ops.rope.HeadPrep` defines what it computes.  Queries are rotated where they lie.  A thread holds both halves of a
head's pair, so nothing is overwritten before it is read.  Chained, positions and slots are read before the wait: they were
complete before the norm in front of the projection.

Shapes: T tokens, Q query heads, K kv heads, X = Q + 2K rows of a token, D head dim, E = D / 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.rope import HeadPrep

FEW_TOKENS = 64  # up to here a token's heads are spread over several programs, which shortens the one wave there is


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def rope_store_kernel(
    qkv,  # [T, X, D]
    kv,  # [slots, 2, K, D]
    slots,  # [T] int64
    positions,  # [T] int64
    table,  # [P, 2, D]
    norm,  # [Q + K, D]
    eps,
    stride_t,
    stride_slot,
    stride_v,
    stride_kv_head,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, PADDED_HALF)
    rotated_X = x < QUERY_HEADS + KV_HEADS
    is_query_X = x < QUERY_HEADS
    ok_XE = (x < QUERY_HEADS + 2 * KV_HEADS)[:, None] & (e < HALF)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    turn_E = table + position * (4 * HALF) + e
    cos_low_E = tl.load(turn_E, mask=e < HALF, other=0.0).to(tl.float32)
    cos_high_E = tl.load(turn_E + HALF, mask=e < HALF, other=0.0).to(tl.float32)
    sin_low_E = tl.load(turn_E + 2 * HALF, mask=e < HALF, other=0.0).to(tl.float32)
    sin_high_E = tl.load(turn_E + 3 * HALF, mask=e < HALF, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at_XE = qkv + token * stride_t + x[:, None] * (2 * HALF) + e[None, :]
    low_XE = tl.load(at_XE, mask=ok_XE, other=0.0).to(tl.float32)
    high_XE = tl.load(at_XE + HALF, mask=ok_XE, other=0.0).to(tl.float32)
    a_XE, b_XE = low_XE, high_XE
    if HAS_NORM:
        rms_X = tl.rsqrt((tl.sum(a_XE * a_XE, 1) + tl.sum(b_XE * b_XE, 1)) / (2 * HALF) + eps)
        weight_XE = norm + x[:, None] * (2 * HALF) + e[None, :]
        ok_norm_XE = ok_XE & rotated_X[:, None]
        a_XE = a_XE * rms_X[:, None] * tl.load(weight_XE, mask=ok_norm_XE, other=0.0).to(tl.float32)
        b_XE = b_XE * rms_X[:, None] * tl.load(weight_XE + HALF, mask=ok_norm_XE, other=0.0).to(tl.float32)
    low_XE = tl.where(rotated_X[:, None], a_XE * cos_low_E[None, :] + b_XE * sin_low_E[None, :], low_XE)
    high_XE = tl.where(rotated_X[:, None], b_XE * cos_high_E[None, :] + a_XE * sin_high_E[None, :], high_XE)

    row_X = x - QUERY_HEADS  # of the K keys, then the K values
    cache_X = slot * stride_slot + (row_X // KV_HEADS) * stride_v + (row_X % KV_HEADS) * stride_kv_head
    to_XE = tl.where(is_query_X[:, None], at_XE, kv + cache_X[:, None] + e[None, :])
    tl.store(to_XE, low_XE.to(kv.dtype.element_ty), mask=ok_XE)
    tl.store(to_XE + HALF, high_XE.to(kv.dtype.element_ty), mask=ok_XE)


def launch_rope_store(qkv_TXD: Tensor, kv: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
    """Rotates, stores, and returns the queries [T, Q, D], a view of the input."""
    T, X, D = qkv_TXD.shape
    K = prep.num_kv_heads
    Q = X - 2 * K
    table, norm = prep.rotation.table_P2D, prep.norm_HD
    assert kv.shape[1:] == (2, K, D) and kv.dtype == qkv_TXD.dtype and kv.stride(3) == 1 and Q > 0
    assert qkv_TXD.stride()[1:] == (D, 1) and table.is_contiguous() and slots_T.shape == (T,)
    block = triton.next_power_of_2(X) if T > FEW_TOKENS else min(8, triton.next_power_of_2(X))
    if T:
        rope_store_kernel[(T, triton.cdiv(X, block))](
            qkv_TXD, kv, slots_T.contiguous(), prep.rotation.positions_T.contiguous(), table,
            table if norm is None else norm, prep.eps, qkv_TXD.stride(0), *kv.stride()[:3],
            QUERY_HEADS=Q, KV_HEADS=K, HALF=D // 2, PADDED_HALF=triton.next_power_of_2(D // 2), BLOCK=block,
            HAS_NORM=norm is not None, num_warps=4 if block > 8 else 1, **chained(kv.device),
        )  # fmt: skip
    return qkv_TXD[:, :Q]
