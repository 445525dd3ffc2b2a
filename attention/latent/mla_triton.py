"""The kernels that read a paged cache of latents: every absorbed query of a row against one slice (split) of the row's keys.

Latents in 8 bits (caches/fp8_latent.py) are multiplied with their scales as they are loaded, and rounded to the queries' type,
which is what `dequantise_latents` does.

A token's latent is the key of all heads, and its first RANK elements are their value, so one load serves both products.  All
heads of several queries share a tile, which reads each key once.  Each split leaves a state of its own;
`attend_latent` in mla_launch.py decides how many splits there are and merges their states.

Order of chained launches (specdec/ops/launch.py): before gdc_wait the kernel reads tables, lengths and first keys, as
kernels/paged_triton.py does.

Shapes: M rows of a tile (queries x heads), N keys of a block, C latent rank, R rotated dim, B rows, T queries, H heads, S
states of each query.
"""

import triton
import triton.language as tl

from specdec.attention.kernels.paged_triton import LOG2E, store_lse
from specdec.attention.kernels.tables_triton import slots_on


@triton.jit
def latents(
    latent, scales, slot_N, ok_N, LATENT_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr, to: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """[N, C] of the type `to`: the latents of these slots.

    ok_N: slots that are not ok are not read, and give zeros; None: all are ok.
    SCALED: the latents are quantised; 128 adjacent elements share a scale.
    """
    c = tl.arange(0, PADDED_RANK)
    ok_NC = (c < RANK)[None, :]
    if ok_N is not None:
        ok_NC = ok_NC & ok_N[:, None]
    x_NC = tl.load(latent + (slot_N * LATENT_STRIDE)[:, None] + c[None, :], mask=ok_NC, other=0.0)
    if SCALED:
        GROUPS: tl.constexpr = PADDED_RANK // 128
        g = tl.arange(0, GROUPS)
        ok_NG = (g < RANK // 128)[None, :]
        if ok_N is not None:
            ok_NG = ok_NG & ok_N[:, None]
        scale_NG = tl.load(scales + (slot_N * SCALES_STRIDE)[:, None] + g[None, :], mask=ok_NG, other=0.0)
        x_NGE = tl.reshape(x_NC.to(tl.float32), [slot_N.shape[0], GROUPS, 128]) * scale_NG[:, :, None]
        x_NC = tl.reshape(x_NGE, [slot_N.shape[0], PADDED_RANK])
    return x_NC.to(to)


@triton.jit
def rotated_parts(
    rope, slot_N, ok_N, ROPE_STRIDE: tl.constexpr, to: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr
):  # fmt: skip
    """[N, R] of the type `to`: the rotated parts of these slots.  ok_N: as in `latents`."""
    r = tl.arange(0, PADDED_ROPE)
    ok_NR = (r < ROPE)[None, :]
    if ok_N is not None:
        ok_NR = ok_NR & ok_N[:, None]
    return tl.load(rope + (slot_N * ROPE_STRIDE)[:, None] + r[None, :], mask=ok_NR, other=0.0).to(to)


@triton.jit
def products(q_MC, q_MR, c_NC, r_NR):
    """[M, N]: the products of queries and keys."""
    return tl.dot(q_MR, tl.trans(r_NR), tl.dot(q_MC, tl.trans(c_NC), input_precision="ieee"), input_precision="ieee")


@triton.jit
def absorb(s_MN, c_NC, top_M, total_M, acc_MC):
    """Adds a block of keys to a running softmax in base 2.  A query that has read no key yet stays as it is."""
    new_M = tl.maximum(top_M, tl.max(s_MN, 1))
    shift_M = tl.where(new_M == -float("inf"), 0.0, new_M)
    p_MN = tl.exp2(s_MN - shift_M[:, None])
    decay_M = tl.exp2(top_M - shift_M)
    total_M = total_M * decay_M + tl.sum(p_MN, 1)
    acc_MC = tl.dot(p_MN.to(c_NC.dtype), c_NC, acc_MC * decay_M[:, None], input_precision="ieee")
    return new_M, total_M, acc_MC


@triton.jit(
    do_not_specialize=["stride_row", "tiles", "first_state", "states"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q", "starts"],
)
def latent_attention_kernel(
    q,  # [T, H, C + R]
    latent,  # [slots, C], any float type
    rope,  # [slots, R]
    scales,  # [slots, C / 128] float32
    page_table,  # [B, W] int32
    cache_seqlens,  # [B] int32
    cu_seqlens_q,  # [B + 1] int32
    starts,  # [T] int32
    out,  # [T, H, S, C], any float type
    lse,  # [T, H, S] float32, natural log
    scale,
    stride_qt,
    stride_qh,
    stride_row,
    tiles,
    first_state,  # the index of this segment's first split among the states
    states,  # S
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0) % tiles  # neighbouring programs read the same keys, mostly from L2
    if CAUSAL:
        tile = tiles - 1 - tile  # the tiles with the most keys start first
    row = tl.program_id(0) // tiles
    split = tl.program_id(1)
    splits = tl.num_programs(1)

    first = tl.load(cu_seqlens_q + row, cache_modifier=".cg")
    queries = tl.load(cu_seqlens_q + row + 1, cache_modifier=".cg") - first
    length = tl.load(cache_seqlens + row, cache_modifier=".cg")
    gqa_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M = gqa_M // HEADS
    head_M = gqa_M % HEADS
    ok_M = query_M < queries
    token_M = (first + query_M).to(tl.int64)
    end = length
    if CAUSAL:  # keys up to the tile's last query
        end = length - tl.maximum(queries - 1 - (tile * BLOCK_M + BLOCK_M - 1) // HEADS, 0)
    end = tl.where(tile * BLOCK_M < queries * HEADS, end, 0)
    begin = 0
    if HAS_STARTS:  # keys from the first one that any query of the tile reads
        start_M = tl.load(starts + token_M, mask=ok_M, other=2147483647, cache_modifier=".cg")
        begin = tl.maximum(tl.min(start_M, 0), 0)
    # With fewer than MIN_SPLIT_KEYS keys a split, merging would cost more than splitting gains: a short row uses few splits.
    per_split = tl.cdiv(tl.maximum(tl.cdiv(tl.maximum(end - begin, 0), splits), MIN_SPLIT_KEYS), BLOCK_N) * BLOCK_N
    low = begin + split * per_split
    high = tl.minimum(low + per_split, end)
    pages = page_table + row.to(tl.int64) * stride_row
    n = tl.arange(0, BLOCK_N)
    # Every query of the tile reads all keys before `whole`, so blocks up to there need no mask.
    whole = high
    if CAUSAL:
        whole = tl.minimum(high, length - queries + 1)
    if HAS_STARTS:
        whole = low
    whole = low + tl.maximum(whole - low, 0) // BLOCK_N * BLOCK_N

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    c = tl.arange(0, PADDED_RANK)
    r = tl.arange(0, PADDED_ROPE)
    ok_C = c < RANK
    ok_R = r < ROPE
    from_M = q + token_M * stride_qt + head_M * stride_qh
    q_MC = tl.load(from_M[:, None] + c[None, :], mask=ok_M[:, None] & ok_C[None, :], other=0.0)
    q_MR = tl.load(from_M[:, None] + RANK + r[None, :], mask=ok_M[:, None] & ok_R[None, :], other=0.0)
    top_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MC = tl.zeros([BLOCK_M, PADDED_RANK], tl.float32)
    scale_log2 = scale * LOG2E
    # A block's page numbers are read one block ahead, so that the loads of its keys can start at once.
    page_N = tl.load(pages + (low + n) // PAGE_SIZE, mask=low + n < whole, other=0)
    for start in tl.range(low, whole, BLOCK_N, num_stages=STAGES):
        slot_N = slots_on(page_N, start + n, PAGE_SIZE)
        ahead_N = start + BLOCK_N + n
        page_N = tl.load(pages + ahead_N // PAGE_SIZE, mask=ahead_N < whole, other=0)
        c_NC = latents(latent, scales, slot_N, None, LATENT_STRIDE, SCALES_STRIDE, q_MC.dtype, RANK, PADDED_RANK, SCALED)
        r_NR = rotated_parts(rope, slot_N, None, ROPE_STRIDE, q_MR.dtype, ROPE, PADDED_ROPE)
        s_MN = products(q_MC, q_MR, c_NC, r_NR) * scale_log2
        top_M, total_M, acc_MC = absorb(s_MN, c_NC, top_M, total_M, acc_MC)
    for start in tl.range(whole, high, BLOCK_N, num_stages=STAGES):
        key_N = start + n
        ok_N = key_N < high
        page_N = tl.load(pages + key_N // PAGE_SIZE, mask=ok_N, other=0)
        slot_N = slots_on(page_N, key_N, PAGE_SIZE)
        # Masked: an unwritten slot may hold NaN, and 0 * NaN is NaN.
        c_NC = latents(latent, scales, slot_N, ok_N, LATENT_STRIDE, SCALES_STRIDE, q_MC.dtype, RANK, PADDED_RANK, SCALED)
        r_NR = rotated_parts(rope, slot_N, ok_N, ROPE_STRIDE, q_MR.dtype, ROPE, PADDED_ROPE)
        visible_MN = ok_N[None, :] & ok_M[:, None]
        if CAUSAL:
            visible_MN &= key_N[None, :] < (length - (queries - 1 - query_M))[:, None]
        if HAS_STARTS:
            visible_MN &= key_N[None, :] >= start_M[:, None]
        s_MN = tl.where(visible_MN, products(q_MC, q_MR, c_NC, r_NR) * scale_log2, -float("inf"))
        top_M, total_M, acc_MC = absorb(s_MN, c_NC, top_M, total_M, acc_MC)

    state_M = (token_M * HEADS + head_M) * states + first_state + split
    safe_M = store_lse(lse, state_M, top_M, total_M, ok_M, 0.0)
    # The merge ignores the output of a split whose lse is -inf, so a short row's idle splits write no output.
    written_M = query_M < tl.where((low < high) | (states == 1), queries, 0)
    tl.store(
        out + state_M[:, None] * RANK + c[None, :],
        (acc_MC / safe_M[:, None]).to(out.dtype.element_ty),
        mask=written_M[:, None] & ok_C[None, :],
    )


@triton.jit(
    do_not_specialize=["stride_row", "states"],
    do_not_specialize_on_alignment=["slot_table", "cache_seqlens", "starts"],
)
def latent_merge_kernel(
    q,  # [T, H, C + R]
    latent,  # [slots, C], any float type
    rope,  # [slots, R]
    scales,  # [slots, C / 128] float32
    slot_table,  # [T, W] int32
    cache_seqlens,  # [T] int32
    starts,  # [T] int32
    partial_out,  # [T, H, S, C], any float type
    partial_lse,  # [T, H, S] float32, natural log
    out,  # [T, H, C], any float type
    lse,  # [T, H] float32, natural log
    scale,
    stride_qt,
    stride_qh,
    stride_row,
    states,  # S
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED_STATES: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_SUFFIX: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reads each query's few keys of its own (its suffix, given as slots) and merges them with the states of splits and
    segments.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, PADDED_RANK)
    r = tl.arange(0, PADDED_ROPE)
    ok_H = h < HEADS
    ok_C = c < RANK
    ok_R = r < ROPE
    top_H = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total_H = tl.zeros([BLOCK_H], tl.float32)
    acc_HC = tl.zeros([BLOCK_H, PADDED_RANK], tl.float32)

    if HAS_SUFFIX:
        length = tl.load(cache_seqlens + token)
        begin = 0
        if HAS_STARTS:
            begin = tl.maximum(tl.load(starts + token), 0)
        from_H = q + token * stride_qt + h * stride_qh
        q_HC = tl.load(from_H[:, None] + c[None, :], mask=ok_H[:, None] & ok_C[None, :], other=0.0)
        q_HR = tl.load(from_H[:, None] + RANK + r[None, :], mask=ok_H[:, None] & ok_R[None, :], other=0.0)
        for start in range(begin, length, BLOCK_N):
            key_N = start + tl.arange(0, BLOCK_N)
            ok_N = key_N < length
            slot_N = tl.load(slot_table + token * stride_row + key_N, mask=ok_N, other=0).to(tl.int64)
            c_NC = latents(latent, scales, slot_N, ok_N, LATENT_STRIDE, SCALES_STRIDE, q_HC.dtype, RANK, PADDED_RANK, SCALED)
            r_NR = rotated_parts(rope, slot_N, ok_N, ROPE_STRIDE, q_HR.dtype, ROPE, PADDED_ROPE)
            s_HN = tl.dot(q_HC, tl.trans(c_NC), input_precision="ieee")
            s_HN = tl.dot(q_HR, tl.trans(r_NR), s_HN, input_precision="ieee") * scale
            s_HN = tl.where(ok_N[None, :], s_HN, -float("inf"))
            new_H = tl.maximum(top_H, tl.max(s_HN, 1))  # finite: every block holds a readable key
            p_HN = tl.exp(s_HN - new_H[:, None])
            decay_H = tl.exp(top_H - new_H)
            total_H = total_H * decay_H + tl.sum(p_HN, 1)
            acc_HC = tl.dot(p_HN.to(c_NC.dtype), c_NC, acc_HC * decay_H[:, None], input_precision="ieee")
            top_H = new_H

    state_H = (token * HEADS + h) * states
    s = tl.arange(0, PADDED_STATES)
    ok_HS = ok_H[:, None] & (s < states)[None, :]
    lse_HS = tl.load(partial_lse + state_H[:, None] + s[None, :], mask=ok_HS, other=-float("inf"))
    live = tl.max(tl.max(tl.where(lse_HS > -float("inf"), s[None, :] + 1, 0), 1), 0)  # only idle splits follow
    new_H = tl.maximum(top_H, tl.max(lse_HS, 1))
    shift_H = tl.where(new_H == -float("inf"), 0.0, new_H)  # -inf: no key was read
    total_H = total_H * tl.exp(top_H - shift_H) + tl.sum(tl.exp(lse_HS - shift_H[:, None]), 1)
    acc_HC = acc_HC * tl.exp(top_H - shift_H)[:, None]
    for start in range(0, live, UNROLL):
        for step in tl.static_range(UNROLL):
            ok_state_H = h < tl.where(start + step < live, HEADS, 0)
            lse_H = tl.load(partial_lse + state_H + start + step, mask=ok_state_H, other=-float("inf"))
            at_HC = (state_H + start + step)[:, None] * RANK + c[None, :]
            out_HC = tl.load(partial_out + at_HC, mask=ok_state_H[:, None] & ok_C[None, :], other=0.0)
            # An idle split wrote no output.  Loading the output and dropping it is faster than waiting for the split's lse.
            weight_H = tl.exp(lse_H - shift_H)
            acc_HC += tl.where((lse_H > -float("inf"))[:, None], out_HC * weight_H[:, None], 0.0)

    some_H = total_H > 0
    safe_H = tl.where(some_H, total_H, 1.0)
    at_H = token * HEADS + h
    tl.store(lse + at_H, tl.where(some_H, shift_H + tl.log(safe_H), -float("inf")), mask=ok_H)
    out_HC = (acc_HC / safe_H[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_H[:, None] * RANK + c[None, :], out_HC, mask=ok_H[:, None] & ok_C[None, :])
