"""The kernel that reads a paged cache: every query of a row against one slice (split) of the row's keys.

Knows pages, not what the keys are: prefixes, prompts and chains look alike.  Queries and the heads of a group are
packed into one tile, so keys and values are read once for all of them.  Each split leaves its own state; who merges
them, and how many there are, is the launcher's business.

Chained (see specdec/ops/launch.py), it reads the page table and the lengths before it waits: they must be older than the
kernel right before it, which in a model stores the queries' own keys.

Shapes: M packed queries x heads of a tile, N keys of a block, D head dim, R rows, T queries, H heads, K kv heads,
S splits.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    # Batch, lengths and table width change from call to call; a 1 or a multiple of 16 must not mean a new compilation.
    do_not_specialize=["stride_row", "tiles"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q"],
)
def paged_attention_kernel(
    q,  # [T, H, D]
    kv,  # [slots, 2, K, D]
    page_table,  # [R, W] int32
    cache_seqlens,  # [R] int32
    cu_seqlens_q,  # [R + 1] int32
    out,  # [T, H, S, D], any float type
    lse,  # [T, H, S] float32, natural log
    scale,
    stride_qt,
    stride_qh,
    stride_slot,
    stride_v,
    stride_kv_head,
    stride_row,
    tiles,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0) % tiles  # neighbours share keys, so all but the first find them in L2
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest first
    kv_head = (tl.program_id(0) // tiles) % KV_HEADS
    row = tl.program_id(0) // tiles // KV_HEADS
    split = tl.program_id(1)
    splits = tl.num_programs(1)

    first = tl.load(cu_seqlens_q + row)
    queries = tl.load(cu_seqlens_q + row + 1) - first
    length = tl.load(cache_seqlens + row)
    packed_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M = packed_M // GROUP
    head_M = kv_head * GROUP + packed_M % GROUP
    ok_M = query_M < queries
    end = length
    if CAUSAL:  # keys up to the tile's last query
        end = length - tl.maximum(queries - 1 - (tile * BLOCK_M + BLOCK_M - 1) // GROUP, 0)
    end = tl.where(tile * BLOCK_M < queries * GROUP, end, 0)
    # At least so many keys, or merging costs more than splitting gains: of many splits, a short row uses the first few.
    per_split = tl.cdiv(tl.maximum(tl.cdiv(tl.maximum(end, 0), splits), LEAST), BLOCK_N) * BLOCK_N
    low = split * per_split
    high = tl.minimum(low + per_split, end)
    pages = page_table + row.to(tl.int64) * stride_row
    kv += kv_head.to(tl.int64) * stride_kv_head
    n = tl.arange(0, BLOCK_N)
    # A block's page numbers are read one block ahead: its keys then wait for nothing but themselves.
    page_N = tl.load(pages + (low + n) // PAGE_SIZE, mask=low + n < high, other=0)

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    d = tl.arange(0, PADDED_DIM)
    ok_D = d < HEAD_DIM
    token_M = (first + query_M).to(tl.int64)
    q_MD = tl.load(
        q + (token_M * stride_qt + head_M * stride_qh)[:, None] + d[None, :],
        mask=ok_M[:, None] & ok_D[None, :],
        other=0.0,
    )
    top_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    scale2 = scale * LOG2E
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key_N = start + n
        ok_N = key_N < high
        slot_N = page_N.to(tl.int64) * PAGE_SIZE + key_N % PAGE_SIZE
        page_N = tl.load(pages + (key_N + BLOCK_N) // PAGE_SIZE, mask=key_N + BLOCK_N < high, other=0)
        at_ND = kv + (slot_N * stride_slot)[:, None] + d[None, :]
        ok_ND = ok_N[:, None] & ok_D[None, :]  # values too: 0 times the NaN of an unwritten slot is NaN
        k_ND = tl.load(at_ND, mask=ok_ND, other=0.0)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if CAUSAL:
            visible_MN = ok_N[None, :] & (key_N[None, :] < (length - (queries - 1 - query_M))[:, None])
            s_MN = tl.where(visible_MN, s_MN * scale2, -float("inf"))
            new_M = tl.maximum(top_M, tl.max(s_MN, 1))
            shift_M = tl.where(new_M == -float("inf"), 0.0, new_M)  # a query that has seen nothing yet
        else:
            s_MN = s_MN * scale2 + tl.where(ok_N, 0.0, -float("inf"))[None, :]  # one fused multiply-add: scale and mask
            new_M = tl.maximum(top_M, tl.max(s_MN, 1))
            shift_M = new_M
        p_MN = tl.exp2(s_MN - shift_M[:, None])
        decay_M = tl.exp2(top_M - shift_M)
        total_M = total_M * decay_M + tl.sum(p_MN, 1)
        v_ND = tl.load(at_ND + stride_v, mask=ok_ND, other=0.0)
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD * decay_M[:, None], input_precision="ieee")
        top_M = new_M

    state_M = (token_M * (KV_HEADS * GROUP) + head_M) * splits + split
    some_M = total_M > 0
    safe_M = tl.where(some_M, total_M, 1.0)
    tl.store(lse + state_M, tl.where(some_M, (top_M + tl.log2(safe_M)) * LN2, -float("inf")), mask=ok_M)
    # The merge does not read a split whose lse is -inf: a short row's idle splits write nothing.
    written_M = query_M < tl.where((low < high) | (splits == 1), queries, 0)
    tl.store(
        out + state_M[:, None] * HEAD_DIM + d[None, :],
        (acc_MD / safe_M[:, None]).to(out.dtype.element_ty),
        mask=written_M[:, None] & ok_D[None, :],
    )
