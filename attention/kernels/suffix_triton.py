"""The kernel after the paged kernel: it reads each query's few keys of its own (its suffix) and merges all states.

These states are what the paged kernel's splits left.  Without HAS_SUFFIX the kernel only merges.  With HAS_SINKS it adds the
layer's sinks: a sink is one more state, with which the sums begin.
One program handles one query, one kv head and some columns of its values.  Each round trip to L2 takes about as long as all
arithmetic, so columns are shared out where there are few queries: a program then reads all splits at once.  The kernel knows
slots (page size 1), not trees: a row lists the slots that its query reads.

Order of chained launches (specdec/ops/launch.py): before gdc_wait the kernel reads queries, the suffix's keys and its table.
The paged kernel lets this kernel start only after its own wait, so the store of the queries and keys is complete by then.

Values may have another width than keys, and keys may have parts, as in the paged kernel.  Queries that are rounded to int8 are
multiplied in their own type, which represents all int8 values exactly.

Shapes: T queries (one a row), H heads, K kv heads, G heads of a group, D key dim, E value dim, N keys of a
block, S splits, C splits of a chunk.  e: columns of values.
"""

import triton
import triton.language as tl

from specdec.attention.caches.int8_triton import queries_in_int8
from specdec.attention.kernels.paged_triton import capped, fp8_scales, own_part, spaced, values_at


@triton.jit
def first_sums(sink_G, ok_G, HAS_SINKS: tl.constexpr, PADDED_GROUP: tl.constexpr):
    """The largest logit so far, and the sum of weights: nothing, or those of sinks, which are never written."""
    if HAS_SINKS:
        top_G = tl.load(sink_G, mask=ok_G, other=-float("inf"))
        total_G = tl.where(top_G == -float("inf"), 0.0, 1.0)
    else:
        top_G, total_G = tl.full([PADDED_GROUP], -float("inf"), tl.float32), tl.zeros([PADDED_GROUP], tl.float32)
    return top_G, total_G


@triton.jit
def joined(top_G, total_G, acc_GE, lse_G, out_GE):
    """Sums of weights and weighted values, relative to exp(top), with one more state's added."""
    new_G = tl.maximum(top_G, lse_G)
    shift_G = tl.where(new_G == -float("inf"), 0.0, new_G)  # -inf: no key has been read so far
    weight_G, decay_G = tl.exp(lse_G - shift_G), tl.exp(top_G - shift_G)
    return new_G, total_G * decay_G + weight_G, acc_GE * decay_G[:, None] + out_GE * weight_G[:, None]


@triton.jit
def token_scales(at_N, ok_N, is_first, AXIS: tl.constexpr, PARTS: tl.constexpr):
    """Tokens' int8 scales with one more axis; with two parts those of the first part where is_first, else of the second."""
    scale = tl.expand_dims(tl.load(at_N, mask=ok_N, other=0.0, cache_modifier=".cg"), AXIS)
    if PARTS == 2:
        second = tl.expand_dims(tl.load(at_N + 1, mask=ok_N, other=0.0, cache_modifier=".cg"), AXIS)
        scale = tl.where(is_first, scale, second)
    return scale


@triton.jit
def times_scale(p_GN, v_NE, scale, PARTS: tl.constexpr):
    """Weights and values, of which the weights are multiplied with the values' scales, or the values if parts differ."""
    if PARTS == 1:
        p_GN *= scale
    else:
        v_NE = (v_NE.to(tl.float32) * scale).to(v_NE.dtype)
    return p_GN, v_NE


@triton.jit(
    do_not_specialize=["stride_row", "splits", "stride_whole_t", "stride_whole_h", "stride_lse_t", "stride_lse_h"],
    do_not_specialize_on_alignment=[
        "slot_table", "cache_seqlens", "starts", "q_positions", "slopes", "sinks", "whole_out", "whole_lse",
    ],
)  # fmt: skip
def suffix_merge_kernel(
    q,  # [T, H, D]
    kv,  # as in the paged kernel
    scales,  # float32: [2, K * KEY_PARTS], [slots, 2, K * KEY_PARTS] or [slots, K]
    slot_table,  # [T, W] int32
    cache_seqlens,  # [T] int32
    starts,  # [T] int32
    q_positions,  # [T] int32: each query's position, counted from its row's key 0
    slopes,  # [H] float32
    sinks,  # [H] float32
    partial_out,  # [T, H, S, E] float32
    partial_lse,  # [T, H, S] float32, natural log
    whole_out,  # [T, H, E], any float type: one more state, which has no splits
    whole_lse,  # [T, H] float32, natural log
    out,  # [T, H, E], any float type
    lse,  # [T, H] float32, natural log
    scale,
    softcap,
    stride_qt,
    stride_qh,
    stride_slot,
    stride_v,
    stride_kv_head,
    stride_v_head,
    stride_row,
    splits,
    stride_whole_t,
    stride_whole_h,
    stride_lse_t,
    stride_lse_h,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SUFFIX: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ALIBI: tl.constexpr,  # as in the paged kernel
    SOFTCAP: tl.constexpr,
    QUANT: tl.constexpr,  # this and the next as in the paged kernel
    INT8_QUERIES: tl.constexpr,
    HAS_WHOLE: tl.constexpr,
    LEFT_FILLED: tl.constexpr,  # after an empty split there are only empty ones
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d, e = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    ok_G, ok_D, ok_E = g < GROUP, d < HEAD_DIM, e < VALUE_DIM
    ok_GE = ok_G[:, None] & ok_E[None, :]
    head_G = kv_head * GROUP + g
    top_G, total_G = first_sums(sinks + head_G, ok_G, HAS_SINKS, PADDED_GROUP)
    acc_GE = tl.zeros([PADDED_GROUP, COLUMNS], tl.float32)

    if HAS_SUFFIX:
        length = tl.load(cache_seqlens + token, cache_modifier=".cg")
        at_GD, ok_GD = own_part(g, d, GROUP, HEAD_DIM, KEY_PARTS)
        at_GD += token * stride_qt + head_G[:, None] * stride_qh
        q_GD = tl.load(q + at_GD, mask=ok_GD & ok_G[:, None], other=0.0, cache_modifier=".cg")
        if INT8_QUERIES:
            q_GD, q_scale = queries_in_int8(q_GD)
            scale *= q_scale
        kv += kv_head.to(tl.int64) * stride_kv_head
        if VALUE_DIM != HEAD_DIM:
            stride_v += kv_head * (stride_v_head - stride_kv_head)
        begin = 0
        if HAS_STARTS:
            begin = tl.maximum(tl.load(starts + token, cache_modifier=".cg"), 0)
        if ALIBI != "":
            q_at, slope_G = tl.load(q_positions + token, cache_modifier=".cg"), tl.load(slopes + head_G, mask=ok_G, other=0.0)
        if QUANT == "fp8":
            scale *= fp8_scales(scales + kv_head * KEY_PARTS, g, GROUP // KEY_PARTS, KEY_PARTS, 1)
            value_scale = fp8_scales(scales + (KV_HEADS + kv_head) * KEY_PARTS, e, VALUE_DIM // KEY_PARTS, KEY_PARTS, 0)
        for start in range(begin, length, BLOCK_N):
            key_N = start + tl.arange(0, BLOCK_N)
            ok_N = key_N < length
            slot_N = tl.load(slot_table + token * stride_row + key_N, mask=ok_N, other=0, cache_modifier=".cg").to(tl.int64)
            at_ND = kv + (slot_N * stride_slot)[:, None] + d[None, :]
            at_NE = values_at(kv, at_ND, slot_N, stride_slot, e, q.dtype, VALUE_DIM == HEAD_DIM and COLUMNS >= HEAD_DIM, QUANT)
            # Values are masked too: an unwritten slot may hold NaN, and 0 * NaN is NaN.
            k_ND = tl.load(at_ND, mask=ok_N[:, None] & ok_D[None, :], other=0.0, cache_modifier=".cg")
            v_NE = tl.load(at_NE + stride_v, mask=ok_N[:, None] & ok_E[None, :], other=0.0, cache_modifier=".cg")
            if QUANT != "":
                k_ND, v_NE = k_ND.to(q.dtype.element_ty), v_NE.to(q.dtype.element_ty)
            s_GN = tl.dot(q_GD.to(k_ND.dtype), tl.trans(k_ND), input_precision="ieee") * scale
            at_N = scales + slot_N * (KV_HEADS if QUANT == "int8_keys" else 2 * KV_HEADS * KEY_PARTS) + kv_head * KEY_PARTS
            if QUANT == "int8" or QUANT == "int8_keys":
                s_GN *= token_scales(at_N, ok_N, (g < GROUP // 2)[:, None], 0, KEY_PARTS)
            if QUANT == "int8":
                at_N += KV_HEADS * KEY_PARTS
                value_scale = token_scales(at_N, ok_N, (e < VALUE_DIM // 2)[None, :], KEY_PARTS - 1, KEY_PARTS)
            if SOFTCAP:
                s_GN = capped(s_GN, softcap)
            if ALIBI != "":
                s_GN += slope_G[:, None] * spaced(key_N - q_at, ALIBI)[None, :]
            s_GN = tl.where(ok_N[None, :], s_GN, -float("inf"))
            new_G = tl.maximum(top_G, tl.max(s_GN, 1))  # finite: every block holds a readable key
            p_GN, decay_G = tl.exp(s_GN - new_G[:, None]), tl.exp(top_G - new_G)
            total_G = total_G * decay_G + tl.sum(p_GN, 1)
            if QUANT == "fp8" or QUANT == "int8":
                p_GN, v_NE = times_scale(p_GN, v_NE, value_scale, KEY_PARTS)
            acc_GE = tl.dot(p_GN.to(v_NE.dtype), v_NE, acc_GE * decay_G[:, None], input_precision="ieee")
            top_G = new_G

    # All that was read above was complete when the paged kernel passed its own wait: queries, the suffix's keys and its table.
    # The splits' states are complete only after the following wait.
    if PDL:
        tl.extra.cuda.gdc_wait()
    if HAS_WHOLE:
        lse_G = tl.load(whole_lse + token * stride_lse_t + head_G * stride_lse_h, mask=ok_G, other=-float("inf"))
        at_GE = whole_out + token * stride_whole_t + head_G[:, None] * stride_whole_h + e[None, :]
        out_GE = tl.where((lse_G > -float("inf"))[:, None], tl.load(at_GE, mask=ok_GE, other=0.0).to(tl.float32), 0.0)
        top_G, total_G, acc_GE = joined(top_G, total_G, acc_GE, lse_G, out_GE)
    state_G = (token * (KV_HEADS * GROUP) + head_G) * splits
    start = 0
    while start < splits:
        split_C = start + tl.arange(0, CHUNK)
        at_CG = state_G[None, :] + split_C[:, None]
        ok_CG = (split_C < splits)[:, None] & ok_G[None, :]
        lse_CG = tl.load(partial_lse + at_CG, mask=ok_CG, other=-float("inf"))
        if LEFT_FILLED:  # a row much shorter than its table leaves many splits idle
            more_G = ok_G & (start + CHUNK + g * 0 < splits)
            next_G = tl.load(partial_lse + state_G + start + CHUNK, mask=more_G, other=-float("inf"))
        ok_CGE = ok_CG[:, :, None] & ok_E[None, None, :]
        out_CGE = tl.load(partial_out + at_CG[:, :, None] * VALUE_DIM + e[None, None, :], mask=ok_CGE, other=0.0)
        # An idle split wrote no output.  Loading the output and dropping it is faster than waiting for the split's lse first.
        out_CGE = tl.where((lse_CG > -float("inf"))[:, :, None], out_CGE, 0.0)
        new_G = tl.maximum(top_G, tl.max(lse_CG, 0))
        shift_G = tl.where(new_G == -float("inf"), 0.0, new_G)  # -inf: no key has been read so far
        decay_G, weight_CG = tl.exp(top_G - shift_G), tl.exp(lse_CG - shift_G[None, :])
        total_G = total_G * decay_G + tl.sum(weight_CG, 0)
        acc_GE = acc_GE * decay_G[:, None] + tl.sum(weight_CG[:, :, None] * out_CGE, 0)
        top_G = new_G
        start += CHUNK
        if LEFT_FILLED:
            start = tl.where(tl.max(next_G) == -float("inf"), splits, start)

    safe_G = tl.where(total_G > 0, total_G, 1.0)
    at_G = token * (KV_HEADS * GROUP) + head_G
    lse_G = tl.where(total_G > 0, top_G + tl.log(safe_G), -float("inf"))
    tl.store(lse + at_G, lse_G, mask=ok_G & (tl.program_id(2) == 0))
    out_GE = (acc_GE / safe_G[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_G[:, None] * VALUE_DIM + e[None, :], out_GE, mask=ok_GE)
