"""The kernels that read a paged cache of latents: every absorbed query of a row against one slice (split) of the row's keys.

Latents in 8 bits (caches/fp8_latent.py) are multiplied with their scales as they are loaded, and rounded to the queries' type,
which is what `dequantise_latents` does.

A token's latent is the key of all heads, and its first RANK elements are their value, so one load serves both products.  All
heads of several queries share a tile, which reads each key once.  Each split leaves a state of its own;
`attend_latent` in mla_launch.py decides how many splits there are and merges their states.

Order of chained launches (specdec/ops/launch.py): before gdc_wait the kernel reads tables, lengths and first keys, as
kernels/paged_triton.py does, and prefetches its first block into L2.  Rows of selected slots are complete too: the product that
made the queries came after them.

With SWAP_AB keys are the rows of all products: Hopper's wgmma multiplies 64 rows at least, and few heads and queries would fill
a part of them.

Shapes: M rows of a tile (queries x heads), N keys of a block, C latent rank, R rotated dim, B rows, T queries, H heads, S
states of each query.
"""

import triton
import triton.language as tl

from specdec.attention.kernels.paged_triton import LOG2E, store_lse
from specdec.attention.kernels.tables_triton import slots_on
from specdec.ops.products.kernels.dense.stream_triton import prefetch


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
def pages_of(pages, start, n, high, PAGE_SIZE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """The page number of each key of the block from `start` on, [N]; ONE_PAGE: of all its keys.

    They come from L2: the first block's are read before the wait.
    """
    if ONE_PAGE:
        page = tl.load(pages + start // PAGE_SIZE, mask=start < high, other=0, cache_modifier=".cg")
    else:
        page = tl.load(pages + (start + n) // PAGE_SIZE, mask=start + n < high, other=0, cache_modifier=".cg")
    return page


@triton.jit
def slots_in(page, start, n, PAGE_SIZE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """[N] int64: the slots of the keys from `start` on, which lie on these pages (`pages_of`)."""
    if ONE_PAGE:
        slot_N = page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE + n
    else:
        slot_N = slots_on(page, start + n, PAGE_SIZE)
    return slot_N


@triton.jit
def prefetch_latents(
    latent, rope, slot_N, ok_N, LATENT_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr, RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
):  # fmt: skip
    """Prefetches these slots into L2.  Nothing is read, so it may be done before the wait, whoever writes the slots."""
    LINE: tl.constexpr = 1024 // latent.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    at = tl.arange(0, max(PADDED_RANK // LINE, 1)) * LINE
    prefetch(latent + (slot_N * LATENT_STRIDE)[:, None] + at[None, :], ok_N[:, None] & (at < RANK)[None, :])
    prefetch(rope + slot_N * ROPE_STRIDE, ok_N)


@triton.jit
def products(q_MC, q_MR, c_NC, r_NR, SWAP_AB: tl.constexpr):
    """[M, N], or [N, M] if SWAP_AB: the products of queries and keys."""
    if SWAP_AB:
        s = tl.dot(r_NR, tl.trans(q_MR), tl.dot(c_NC, tl.trans(q_MC), input_precision="ieee"), input_precision="ieee")
    else:
        s = tl.dot(q_MR, tl.trans(r_NR), tl.dot(q_MC, tl.trans(c_NC), input_precision="ieee"), input_precision="ieee")
    return s


@triton.jit
def absorb(s, c_NC, top_M, total_M, acc, SWAP_AB: tl.constexpr):
    """Adds a block of keys to a running softmax in base 2.  A query that has read no key yet stays as it is.

    s: [M, N] and acc: [M, C]; [N, M] and [C, M] if SWAP_AB.
    """
    KEYS: tl.constexpr = 0 if SWAP_AB else 1  # the axis of keys, and of latents
    new_M = tl.maximum(top_M, tl.max(s, KEYS))
    shift_M = tl.where(new_M == -float("inf"), 0.0, new_M)
    p = tl.exp2(s - tl.expand_dims(shift_M, KEYS))
    decay_M = tl.exp2(top_M - shift_M)
    total_M = total_M * decay_M + tl.sum(p, KEYS)
    acc *= tl.expand_dims(decay_M, KEYS)
    if SWAP_AB:
        acc = tl.dot(tl.trans(c_NC), p.to(c_NC.dtype), acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(c_NC.dtype), c_NC, acc, input_precision="ieee")
    return new_M, total_M, acc


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
    SWAP_AB: tl.constexpr,
    PDL: tl.constexpr,
):
    KEYS: tl.constexpr = 0 if SWAP_AB else 1  # the axis of keys, and of latents
    ROWS: tl.constexpr = 1 - KEYS
    ALL_MASKED: tl.constexpr = HAS_STARTS or SWAP_AB
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0 and not HAS_STARTS
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
    if ALL_MASKED:
        whole = low
    whole = low + tl.maximum(whole - low, 0) // BLOCK_N * BLOCK_N
    # A block's page numbers are read one block ahead, so that the loads of its keys can start at once.
    page = pages_of(pages, low, n, high, PAGE_SIZE, ONE_PAGE)

    if PDL:
        first_N = slots_in(page, low, n, PAGE_SIZE, ONE_PAGE)
        prefetch_latents(latent, rope, first_N, low + n < high, LATENT_STRIDE, ROPE_STRIDE, RANK, PADDED_RANK)
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
    acc = tl.zeros([PADDED_RANK, BLOCK_M] if SWAP_AB else [BLOCK_M, PADDED_RANK], tl.float32)
    scale_log2 = scale * LOG2E
    if not ALL_MASKED:
        for start in tl.range(low, whole, BLOCK_N, num_stages=STAGES):
            slot_N = slots_in(page, start, n, PAGE_SIZE, ONE_PAGE)
            page = pages_of(pages, start + BLOCK_N, n, high, PAGE_SIZE, ONE_PAGE)
            c_NC = latents(latent, scales, slot_N, None, LATENT_STRIDE, SCALES_STRIDE, q_MC.dtype, RANK, PADDED_RANK, SCALED)
            r_NR = rotated_parts(rope, slot_N, None, ROPE_STRIDE, q_MR.dtype, ROPE, PADDED_ROPE)
            s = products(q_MC, q_MR, c_NC, r_NR, SWAP_AB) * scale_log2
            top_M, total_M, acc = absorb(s, c_NC, top_M, total_M, acc, SWAP_AB)
    for start in tl.range(whole, high, BLOCK_N, num_stages=STAGES):
        key_N = start + n
        ok_N = key_N < high
        slot_N = slots_in(page, start, n, PAGE_SIZE, ONE_PAGE)
        page = pages_of(pages, start + BLOCK_N, n, high, PAGE_SIZE, ONE_PAGE)
        # Masked: an unwritten slot may hold NaN, and 0 * NaN is NaN.
        c_NC = latents(latent, scales, slot_N, ok_N, LATENT_STRIDE, SCALES_STRIDE, q_MC.dtype, RANK, PADDED_RANK, SCALED)
        r_NR = rotated_parts(rope, slot_N, ok_N, ROPE_STRIDE, q_MR.dtype, ROPE, PADDED_ROPE)
        visible = tl.expand_dims(ok_N, ROWS) & tl.expand_dims(ok_M, KEYS)
        if CAUSAL:
            visible &= tl.expand_dims(key_N, ROWS) < tl.expand_dims(length - (queries - 1 - query_M), KEYS)
        if HAS_STARTS:
            visible &= tl.expand_dims(key_N, ROWS) >= tl.expand_dims(start_M, KEYS)
        s = tl.where(visible, products(q_MC, q_MR, c_NC, r_NR, SWAP_AB) * scale_log2, -float("inf"))
        top_M, total_M, acc = absorb(s, c_NC, top_M, total_M, acc, SWAP_AB)

    state_M = (token_M * HEADS + head_M) * states + first_state + split
    safe_M = store_lse(lse, state_M, top_M, total_M, ok_M, 0.0)
    # The merge ignores the output of a split whose lse is -inf, so a short row's idle splits write no output.
    written_M = query_M < tl.where((low < high) | (states == 1), queries, 0)
    tl.store(
        out + tl.expand_dims(state_M, KEYS) * RANK + tl.expand_dims(c, ROWS),
        (acc / tl.expand_dims(safe_M, KEYS)).to(out.dtype.element_ty),
        mask=tl.expand_dims(written_M, KEYS) & tl.expand_dims(ok_C, ROWS),
    )
