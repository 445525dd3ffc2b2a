"""The kernel between projection and attention: q/k norm, rotary positions, and the store of keys and values into their slots.

`specdec.ops.rope.HeadPrep` defines what it computes, and caches/quant_cache.py how 8-bit caches store it.  Queries are rotated
in place: a thread holds both halves of a head's rotated pair, so no element is overwritten before it is read.

Order of chained launches (specdec/ops/launch.py): positions and slots are read before gdc_wait.  They were complete before the
norm ahead of the qkv projection, and the projection lets this kernel start only after that norm is complete.

Values may be normed without a weight, and multiplied with a number.  They may have another width than keys, or be read from the
keys' projections (`specdec.ops.rope.ValuePrep`).

Shapes: T tokens, Q query heads, K kv heads, X = Q + 2K rows of a token, D head dim, E = D / 2 (of a value: half its width).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.int8_keys import Int8KeysView
from specdec.attention.caches.int8_triton import abs_or_inf, round_to_int8, scale_and_inverse
from specdec.attention.caches.quant_cache import FP8_MAX, QuantView
from specdec.attention.caches.split_cache import SplitView
from specdec.ops.launch import chained
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.rope import HeadPrep

MAX_FP8 = tl.constexpr(FP8_MAX)
StoredView = MHAView | QuantView | Int8KeysView


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def rope_store_kernel(
    qkv,  # [T, X, D]; with VALUES_ARE_KEYS no values; with values of another width [T, (Q + K) D + K times that]
    kv,  # [slots, 2, K, D]; with QUANT "int8_keys" the keys [slots, K, D], and the values lie stride_v bytes after them
    slots,  # [T] int64
    positions,  # [T] int64
    table,  # [P, 2, D]
    norm,  # [Q + K, D]
    scales,  # float32: [2, K] of fp8, [slots, 2, K] of int8, [slots, K] of int8_keys
    eps,
    value_scale,
    stride_t,
    stride_slot,
    stride_v,
    stride_kv_head,
    stride_v_head,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,  # 0: there are queries only, and nothing is stored
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    VALUE_HALF: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    SCALES_VALUES: tl.constexpr,
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
    half_X1 = HALF  # where a head's second half begins
    if VALUES_ARE_KEYS:
        at_XE -= tl.where(rotated_X, 0, KV_HEADS * 2 * HALF)[:, None]
    if VALUE_HALF != HALF:
        half_X1 = tl.where(rotated_X, HALF, VALUE_HALF)[:, None]
        ok_XE = (x < QUERY_HEADS + 2 * KV_HEADS)[:, None] & (e[None, :] < half_X1)
        at_XE -= tl.where(rotated_X, 0, (x - QUERY_HEADS - KV_HEADS) * (2 * HALF - 2 * VALUE_HALF))[:, None]
    low_XE = tl.load(at_XE, mask=ok_XE, other=0.0).to(tl.float32)
    high_XE = tl.load(at_XE + half_X1, mask=ok_XE, other=0.0).to(tl.float32)
    a_XE, b_XE = low_XE, high_XE
    if NORMS_VALUES:
        mean_X = (tl.sum(a_XE * a_XE, 1) + tl.sum(b_XE * b_XE, 1)) / (2 * VALUE_HALF)
        low_XE, high_XE = low_XE * tl.rsqrt(mean_X + eps)[:, None], high_XE * tl.rsqrt(mean_X + eps)[:, None]
    if SCALES_VALUES:
        low_XE, high_XE = low_XE * value_scale, high_XE * value_scale
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
        if VALUE_HALF != HALF:
            cache_X += tl.where(rotated_X, 0, row_X % KV_HEADS) * (stride_v_head - stride_kv_head)
        if QUANT == "":
            to_XE = tl.where(is_query_X[:, None], at_XE, kv + cache_X[:, None] + e[None, :])
            tl.store(to_XE, low_XE.to(kv.dtype.element_ty), mask=ok_XE)
            tl.store(to_XE + half_X1, high_XE.to(kv.dtype.element_ty), mask=ok_XE)
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
    K, Q, (k, v) = prep.num_kv_heads, prep.query_heads(X), view.heads
    assert k.shape[1:] == v.shape[1:] == (K, D) and k.stride(2) == v.stride(2) == 1 and Q > 0
    assert qkv_TXD.stride()[1:] == (D, 1) and slots_T.shape == (T,)
    if not T:
        return qkv_TXD[:, :Q]
    if isinstance(view, QuantView) and view.needs_scale:
        view.set_scale(prep.apply_(qkv_TXD.clone())[1])
    quant, scales = view.quant, view.scales
    assert v.dtype == qkv_TXD.dtype or isinstance(view, QuantView)
    assert not quant or scales.is_contiguous()
    strides = k.stride(0), (v.data_ptr() - k.data_ptr()) // k.itemsize, k.stride(1), k.stride(1)
    _launch(qkv_TXD, Q, (D, D), k, strides, scales, slots_T.contiguous(), prep, quant, numerics)
    return qkv_TXD[:, :Q]


def launch_rows_store(rows_TC: Tensor, view: SplitView, slots_T: Tensor, prep: HeadPrep, numerics: Numerics = FAST) -> Tensor:
    """`launch_rope_store` for rows [T, (Q + K) D + K E] of heads whose values have another width than keys."""
    (T, C), K, (k, v) = rows_TC.shape, prep.num_kv_heads, view.heads
    D, E = k.shape[2], v.shape[2]
    q_TQD = rows_TC[:, : C - K * (D + E)].unflatten(1, (-1, D))
    assert (
        D % 2 == E % 2 == 0 and k.stride(2) == v.stride(2) == 1 and k.shape[1] == v.shape[1] == K and not prep.values.are_keys
    )
    assert rows_TC.stride(1) == 1 and slots_T.shape == (T,) and rows_TC.dtype == k.dtype and k.stride(0) == v.stride(0)
    if T:
        strides = k.stride(0), (v.data_ptr() - k.data_ptr()) // k.itemsize, k.stride(1), v.stride(1)
        _launch(rows_TC, q_TQD.shape[1], (D, E), k, strides, k, slots_T.contiguous(), prep, "", numerics)
    return q_TQD


def launch_rope(q_TQD: Tensor, prep: HeadPrep, numerics: Numerics = FAST) -> Tensor:
    """Norms and rotates queries in place, of a layer that has no keys and values, and returns them.  prep: of 0 kv heads."""
    (_, Q, D), strides = q_TQD.shape, q_TQD.stride()
    assert prep.num_kv_heads == 0 and strides[1:] == (D, 1)
    if len(q_TQD) and (prep.rotation is not None or prep.norm_HD is not None):
        slots_T = q_TQD if prep.rotation is None else prep.rotation.positions_T.contiguous()  # not read
        _launch(q_TQD, Q, (D, D), q_TQD, (*strides, strides[2]), q_TQD, slots_T, prep, "", numerics)
    return q_TQD


def _launch(
    qkv: Tensor, Q: int, widths: tuple[int, int], kv: Tensor, strides: tuple[int, ...], scales: Tensor, slots_T: Tensor,
    prep: HeadPrep, quant: str, numerics: Numerics,
) -> None:  # fmt: skip
    """Launches the kernel.  With 0 kv heads, any tensors and strides may stand for kv, strides, scales and slots_T.

    Q, widths: query heads, and the widths of keys and values.  kv: the keys.  strides: of a slot, from a key to its value, of a
    key head and of a value head, all in elements of kv.
    """
    T, K, (D, E), values = len(qkv), prep.num_kv_heads, widths, prep.values
    rotation, norm = prep.rotation, prep.norm_HD
    table, positions_T = (qkv, slots_T) if rotation is None else (rotation.table_P2D, rotation.positions_T)
    assert rotation is None or table.is_contiguous()
    X = Q + 2 * K
    block, padded_half = numerics.heads_a_program(T, X), triton.next_power_of_2(max(D, E) // 2)
    warps = (4 if block > 8 else 1) * max(1, padded_half // 128)  # wider heads would spill registers
    rope_store_kernel[(T, triton.cdiv(X, block))](
        qkv, kv, slots_T, positions_T.contiguous(), table, table if norm is None else norm, scales, prep.eps, values.scale,
        qkv.stride(0), *strides,
        QUERY_HEADS=Q, KV_HEADS=K, HALF=D // 2, PADDED_HALF=padded_half, VALUE_HALF=E // 2, VALUES_ARE_KEYS=values.are_keys,
        NORMS_VALUES=values.normed, SCALES_VALUES=values.scale != 1.0, BLOCK=block,
        HAS_NORM=norm is not None, ROTATES=rotation is not None, QUANT=quant, num_warps=warps, **chained(kv.device),
    )  # fmt: skip
