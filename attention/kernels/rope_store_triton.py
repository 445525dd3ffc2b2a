"""The kernel between projection and attention: q/k norm, rotary positions, and the store of keys and values into their slots.

`specdec.ops.rope.HeadPrep` defines what it computes, and caches/quant_cache.py how 8-bit caches store it.  Queries are rotated
in place: a thread holds both halves of a head's rotated pair, so no element is overwritten before it is read.

Order of chained launches (specdec/ops/launch.py): positions and slots are read before gdc_wait.  They were complete before the
norm ahead of the qkv projection, and the projection lets this kernel start only after that norm is complete.

Shapes: T tokens, Q query heads, K kv heads, X = Q + 2K rows of a token, D head dim, E = D / 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.int8_keys import Int8KeysView
from specdec.attention.caches.int8_triton import abs_or_inf, round_to_int8, scale_and_inverse
from specdec.attention.caches.quant_cache import FP8_MAX, QuantView
from specdec.ops.launch import chained
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.rope import HeadPrep

MAX_FP8 = tl.constexpr(FP8_MAX)
StoredView = MHAView | QuantView | Int8KeysView


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def rope_store_kernel(
    qkv,  # [T, X, D]
    kv,  # [slots, 2, K, D]; with QUANT "int8_keys" the keys [slots, K, D], and the values lie stride_v bytes after them
    slots,  # [T] int64
    positions,  # [T] int64
    table,  # [P, 2, D]
    norm,  # [Q + K, D]
    scales,  # float32: [2, K] of fp8, [slots, 2, K] of int8, [slots, K] of int8_keys
    eps,
    stride_t,
    stride_slot,
    stride_v,
    stride_kv_head,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,  # 0: there are queries only, and nothing is stored
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROTATES: tl.constexpr,
    QUANT: tl.constexpr,  # "", "fp8", "int8" or "int8_keys"
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
    if KV_HEADS > 0:
        slot = tl.load(slots + token, cache_modifier=".cg")
    if ROTATES:
        position = tl.load(positions + token, cache_modifier=".cg")
        cos_sin_E = table + position * (4 * HALF) + e
        cos_low_E = tl.load(cos_sin_E, mask=e < HALF, other=0.0).to(tl.float32)
        cos_high_E = tl.load(cos_sin_E + HALF, mask=e < HALF, other=0.0).to(tl.float32)
        sin_low_E = tl.load(cos_sin_E + 2 * HALF, mask=e < HALF, other=0.0).to(tl.float32)
        sin_high_E = tl.load(cos_sin_E + 3 * HALF, mask=e < HALF, other=0.0).to(tl.float32)
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
    if ROTATES:
        rotated_low_XE = a_XE * cos_low_E[None, :] + b_XE * sin_low_E[None, :]
        b_XE = b_XE * cos_high_E[None, :] + a_XE * sin_high_E[None, :]
        a_XE = rotated_low_XE
    low_XE = tl.where(rotated_X[:, None], a_XE, low_XE)
    high_XE = tl.where(rotated_X[:, None], b_XE, high_XE)

    if KV_HEADS == 0:
        tl.store(at_XE, low_XE.to(qkv.dtype.element_ty), mask=ok_XE)
        tl.store(at_XE + HALF, high_XE.to(qkv.dtype.element_ty), mask=ok_XE)
    else:
        row_X = x - QUERY_HEADS  # rows 0 to K - 1 are keys, K to 2K - 1 values; queries are negative
        cache_X = slot * stride_slot + (row_X // KV_HEADS) * stride_v + (row_X % KV_HEADS) * stride_kv_head
        if QUANT == "":
            to_XE = tl.where(is_query_X[:, None], at_XE, kv + cache_X[:, None] + e[None, :])
            tl.store(to_XE, low_XE.to(kv.dtype.element_ty), mask=ok_XE)
            tl.store(to_XE + HALF, high_XE.to(kv.dtype.element_ty), mask=ok_XE)
        else:
            # What has 8 bits: keys and values, or keys alone.  The other rows are stored as they are.
            is_narrow_X = (row_X >= 0) & (row_X < (KV_HEADS if QUANT == "int8_keys" else 2 * KV_HEADS))
            plain_XE = at_XE
            if QUANT == "int8_keys":
                value_XE = (kv + cache_X).to(qkv.dtype)[:, None] + e[None, :]
                plain_XE = tl.where(is_query_X[:, None], at_XE, value_XE)
            ok_plain_XE = ok_XE & (is_narrow_X == 0)[:, None]
            tl.store(plain_XE, low_XE.to(qkv.dtype.element_ty), mask=ok_plain_XE)
            tl.store(plain_XE + HALF, high_XE.to(qkv.dtype.element_ty), mask=ok_plain_XE)
            if QUANT == "fp8":
                inverse_X = tl.div_rn(1.0, tl.load(scales + row_X, mask=is_narrow_X, other=1.0))
                low_XE = tl.clamp(low_XE * inverse_X[:, None], -MAX_FP8, MAX_FP8)
                high_XE = tl.clamp(high_XE * inverse_X[:, None], -MAX_FP8, MAX_FP8)
            else:
                amax_X = tl.maximum(tl.max(abs_or_inf(low_XE), 1), tl.max(abs_or_inf(high_XE), 1))
                scale_X, inverse_X = scale_and_inverse(amax_X)
                of_slot = scales + slot * (KV_HEADS if QUANT == "int8_keys" else 2 * KV_HEADS)
                tl.store(of_slot + row_X, scale_X, mask=is_narrow_X)
                low_XE = round_to_int8(low_XE, inverse_X[:, None])
                high_XE = round_to_int8(high_XE, inverse_X[:, None])
            to_XE = kv + cache_X[:, None] + e[None, :]
            ok_narrow_XE = ok_XE & is_narrow_X[:, None]
            tl.store(to_XE, low_XE.to(kv.dtype.element_ty), mask=ok_narrow_XE)
            tl.store(to_XE + HALF, high_XE.to(kv.dtype.element_ty), mask=ok_narrow_XE)


def launch_rope_store(qkv_TXD: Tensor, view: StoredView, slots_T: Tensor, prep: HeadPrep, numerics: Numerics = FAST) -> Tensor:
    """Norms and rotates heads, stores keys and values, and returns the queries [T, Q, D], a view of the input.

    slots_T: int64.  An fp8 view without a scale gets its scale from these keys and values.
    """
    T, X, D = qkv_TXD.shape
    K, (k, v) = prep.num_kv_heads, view.heads
    Q = X - 2 * K
    assert k.shape[1:] == v.shape[1:] == (K, D) and k.stride(2) == v.stride(2) == 1 and Q > 0
    assert qkv_TXD.stride()[1:] == (D, 1) and slots_T.shape == (T,)
    if not T:
        return qkv_TXD[:, :Q]
    if isinstance(view, QuantView) and view.needs_scale:
        view.set_scale(prep.apply_(qkv_TXD.clone())[1])
    quant, scales = view.quant, view.scales
    assert v.dtype == qkv_TXD.dtype or isinstance(view, QuantView)
    assert not quant or scales.is_contiguous()
    strides = k.stride(0), (v.data_ptr() - k.data_ptr()) // k.itemsize, k.stride(1)
    _launch(qkv_TXD, k, strides, scales, slots_T.contiguous(), prep, quant, numerics)
    return qkv_TXD[:, :Q]


def launch_rope(q_TQD: Tensor, prep: HeadPrep, numerics: Numerics = FAST) -> Tensor:
    """Norms and rotates queries in place, of a layer that has no keys and values, and returns them.  prep: of 0 kv heads."""
    assert prep.num_kv_heads == 0 and q_TQD.stride()[1:] == (q_TQD.shape[2], 1)
    if len(q_TQD) and (prep.rotation is not None or prep.norm_HD is not None):
        slots_T = q_TQD if prep.rotation is None else prep.rotation.positions_T.contiguous()  # not read
        _launch(q_TQD, q_TQD, q_TQD.stride(), q_TQD, slots_T, prep, "", numerics)
    return q_TQD


def _launch(
    qkv_TXD: Tensor, kv: Tensor, strides: tuple[int, ...], scales: Tensor, slots_T: Tensor, prep: HeadPrep, quant: str,
    numerics: Numerics,
) -> None:  # fmt: skip
    """Launches the kernel.  With 0 kv heads, any tensors and strides may stand for kv, strides, scales and slots_T.

    kv: the keys.  strides: of a slot, from a key to its value, and of a kv head, all in elements of kv.
    """
    T, X, D = qkv_TXD.shape
    K = prep.num_kv_heads
    rotation, norm = prep.rotation, prep.norm_HD
    table, positions_T = (qkv_TXD, slots_T) if rotation is None else (rotation.table_P2D, rotation.positions_T)
    assert rotation is None or table.is_contiguous()
    block, padded_half = numerics.heads_a_program(T, X), triton.next_power_of_2(D // 2)
    warps = (4 if block > 8 else 1) * max(1, padded_half // 128)  # wider heads would spill registers
    rope_store_kernel[(T, triton.cdiv(X, block))](
        qkv_TXD, kv, slots_T, positions_T.contiguous(), table, table if norm is None else norm, scales, prep.eps,
        qkv_TXD.stride(0), *strides,
        QUERY_HEADS=X - 2 * K, KV_HEADS=K, HALF=D // 2, PADDED_HALF=padded_half, BLOCK=block,
        HAS_NORM=norm is not None, ROTATES=rotation is not None, QUANT=quant,
        num_warps=warps, **chained(kv.device),
    )  # fmt: skip
