"""The kernels of kv_blocks_triton.py for latents: attention of absorbed queries in which positions fix the order of sums.

states_triton.py defines KV blocks and states.  What differs is a key: the latent, which is the value too, and a rotated part.
All heads read the same key, so a tile holds all heads of some queries.

A tile of 64 queries has no room for two weighted sums of long latents, which a program needs to merge KV blocks.  So the
values are cut into PARTS pieces of DIM columns, a program for each.  It multiplies queries with whole keys, and with its
own piece first.  To all else a head is then PARTS heads, which lie one after the other: `merge_kv_blocks_kernel` serves latents
as it is.

Order of chained launches (specdec/ops/launch.py): as in kv_blocks_triton.py.

Shapes: M rows of a tile (queries x heads), N keys of a step, D columns of a piece, C = PARTS * D latent rank, R rotated dim, B
rows, T queries, H heads, S states.
"""

import triton
import triton.language as tl

from specdec.attention.invariant.states_triton import (
    add_keys,
    complete_kv_blocks,
    empty_state,
    kv_block_of,
    kv_block_start,
    load_sums,
    merged_sums,
    next_kv_block,
    store_output,
    store_sums,
)
from specdec.attention.kernels.paged_triton import LOG2E
from specdec.attention.kernels.tables_triton import slots_on


@triton.jit
def load_queries(
    q_M, part, ok_M, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PARTS: tl.constexpr, ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
):  # fmt: skip
    """(the piece `part` of queries, their other piece, their rotated part).  q_M: where each query begins."""
    d, r = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_ROPE)
    ok_MD, ok_MR = ok_M[:, None] & (d < DIM)[None, :], ok_M[:, None] & (r < ROPE)[None, :]
    q_MD = tl.load(q_M[:, None] + part * DIM + d[None, :], mask=ok_MD, other=0.0)
    q_MR = tl.load(q_M[:, None] + PARTS * DIM + r[None, :], mask=ok_MR, other=0.0)
    other_MD = q_MD
    if PARTS == 2:
        other_MD = tl.load(q_M[:, None] + (1 - part) * DIM + d[None, :], mask=ok_MD, other=0.0)
    return q_MD, other_MD, q_MR


@triton.jit
def read_latents(
    q_MD, other_MD, q_MR, latent, rope, slot_N, ok_N, visible_MN, part, state, scale,
    LATENT_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """`add_keys` for the latents of these slots.  Slots that are not ok give zeros: they may hold NaN, and 0 * NaN is NaN."""
    d, r = tl.arange(0, q_MD.shape[1]), tl.arange(0, q_MR.shape[1])
    ok_ND = ok_N[:, None] & (d < DIM)[None, :]
    at_ND = latent + (slot_N * LATENT_STRIDE)[:, None] + d[None, :]
    r_NR = tl.load(rope + (slot_N * ROPE_STRIDE)[:, None] + r[None, :], mask=ok_N[:, None] & (r < ROPE)[None, :], other=0.0)
    v_ND = tl.load(at_ND + part * DIM, mask=ok_ND, other=0.0)
    s_MN = tl.dot(q_MR, tl.trans(r_NR), input_precision="ieee")
    s_MN = tl.dot(q_MD, tl.trans(v_ND), s_MN, input_precision="ieee")
    if PARTS == 2:
        other_ND = tl.load(at_ND + (1 - part) * DIM, mask=ok_ND, other=0.0)
        s_MN = tl.dot(other_MD, tl.trans(other_ND), s_MN, input_precision="ieee")
    return add_keys(s_MN, v_ND, visible_MN, state, scale * LOG2E)


@triton.jit(
    do_not_specialize=["stride_row", "states", "tiles"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q"],
)
def latent_kv_blocks_kernel(
    q,  # [T, H, C + R]
    latent,  # [slots, C]
    rope,  # [slots, R]
    page_table,  # [B, W] int32
    cache_seqlens,  # [B] int32
    cu_seqlens_q,  # [B + 1] int32
    out,  # [T, H, PARTS, D], any float type; written if UNSPLIT and not TREE
    lse,  # [T, H, PARTS] float32, likewise
    accs,  # [T, H, PARTS, S, D] float32: written otherwise
    sums,  # [T, H, PARTS, S, 2] float32, likewise
    scale,
    stride_qt,
    stride_qh,
    stride_row,
    states,  # S
    tiles,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,  # stop before the step that the tree's first key lies in
    UNSPLIT: tl.constexpr,  # a program computes all KV blocks of its queries
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KV_BLOCK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # the tiles with the most keys start first
    part, row = (tl.program_id(0) // tiles) % PARTS, tl.program_id(0) // tiles // PARTS
    first = tl.load(cu_seqlens_q + row, cache_modifier=".cg")
    queries = tl.load(cu_seqlens_q + row + 1, cache_modifier=".cg") - first
    length = tl.load(cache_seqlens + row, cache_modifier=".cg")
    gqa_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M, head_M = gqa_M // HEADS, gqa_M % HEADS
    ok_M = query_M < queries
    end = length
    if CAUSAL:  # keys up to the tile's last query
        end = length - tl.maximum(queries - 1 - (tile * BLOCK_M + BLOCK_M - 1) // HEADS, 0)
    if TREE:
        end = length // BLOCK_N * BLOCK_N
    end = tl.maximum(tl.where(tile * BLOCK_M < queries * HEADS, end, 0), 0)
    block = end * 0
    if not UNSPLIT:  # the last KV blocks are the largest, so they start first
        block += tl.num_programs(1) - 1 - tl.program_id(1)
    low, block_end = kv_block_start(block, MIN_KV_BLOCK, DOUBLINGS), kv_block_start(block + 1, MIN_KV_BLOCK, DOUBLINGS)
    high = end if UNSPLIT else tl.minimum(block_end, end)
    pages = page_table + row.to(tl.int64) * stride_row
    n = tl.arange(0, BLOCK_N)
    # Page numbers are read one step ahead, so that the loads of a step's keys can start at once.
    page_N = tl.load(pages + (low + n) // PAGE_SIZE, mask=low + n < high, other=0, cache_modifier=".cg")

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    ok_D = tl.arange(0, PADDED_DIM) < DIM
    token_M = (first + query_M).to(tl.int64)
    q_M = q + token_M * stride_qt + head_M * stride_qh
    q_MD, other_MD, q_MR = load_queries(q_M, part, ok_M, DIM, PADDED_DIM, PARTS, ROPE, PADDED_ROPE)
    last_M = length - (queries - query_M) if CAUSAL else query_M * 0 + (length - 1)  # the last key that each query reads
    state = empty_state(BLOCK_M, PADDED_DIM)
    if UNSPLIT:  # the state over the KV blocks before this one
        before = state
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key_N = start + n
        ok_N = key_N < high
        slot_N = slots_on(page_N, key_N, PAGE_SIZE)
        page_N = tl.load(pages + (key_N + BLOCK_N) // PAGE_SIZE, mask=key_N + BLOCK_N < high, other=0)
        visible_MN = ok_N[None, :] & (key_N[None, :] <= last_M[:, None])
        if UNSPLIT:
            if start == block_end:
                before, state, block, block_end = next_kv_block(before, state, block, MIN_KV_BLOCK, DOUBLINGS)
        state = read_latents(
            q_MD, other_MD, q_MR, latent, rope, slot_N, ok_N, visible_MN, part, state, scale,
            LATENT_STRIDE, ROPE_STRIDE, DIM, PARTS, ROPE,
        )  # fmt: skip

    at_M = (token_M * HEADS + head_M) * PARTS + part
    if not UNSPLIT:
        store_sums(sums, accs, at_M * states + block, state, ok_M, ok_D, DIM)
    elif TREE:  # two states: all KV blocks that are complete, and the one in which the tree begins
        if end == block_end:
            before = merged_sums(before, state)
            state = tl.full([BLOCK_M], -float("inf"), tl.float32), state[1], state[2]
        store_sums(sums, accs, at_M * 2, before, ok_M, ok_D, DIM)
        store_sums(sums, accs, at_M * 2 + 1, state, ok_M, ok_D, DIM)
    else:
        store_output(out, lse, at_M, merged_sums(before, state), ok_M, ok_D, DIM)


@triton.jit(
    do_not_specialize=["stride_row", "stride_path", "states", "nodes"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "paths", "path_lens"],
)
def latent_path_kernel(
    q,  # as in latent_kv_blocks_kernel
    latent,
    rope,
    page_table,  # [B, W] int32
    cache_seqlens,  # [B] int32: the position of each tree's root
    paths,  # [T, X] int32: the slots of each node's path, from the root to itself
    path_lens,  # [T] int32
    accs,  # [T, H, PARTS, S, D] float32: what latent_kv_blocks_kernel and merge_kv_blocks_kernel left
    sums,  # [T, H, PARTS, S, 2] float32
    out,  # [T, H, PARTS, D], any float type
    lse,  # [T, H, PARTS] float32
    scale,
    stride_qt,
    stride_qh,
    stride_row,
    stride_path,
    states,  # S
    nodes,  # of a tree
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UNSPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KV_BLOCK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head_M = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    ok_M = head_M < HEADS
    n, ok_D = tl.arange(0, BLOCK_N), tl.arange(0, PADDED_DIM) < DIM
    length = tl.load(cache_seqlens + token // nodes)
    end = length + tl.load(path_lens + token)
    base = length // BLOCK_N * BLOCK_N
    block = kv_block_of(base, MIN_KV_BLOCK, DOUBLINGS)
    block_end = kv_block_start(block + 1, MIN_KV_BLOCK, DOUBLINGS)
    complete = complete_kv_blocks(
        tl.program_id(0), cache_seqlens, cache_seqlens, nodes, False, BLOCK_N, MIN_KV_BLOCK, DOUBLINGS
    )
    q_M = q + token * stride_qt + head_M * stride_qh
    q_MD, other_MD, q_MR = load_queries(q_M, part, ok_M, DIM, PADDED_DIM, PARTS, ROPE, PADDED_ROPE)
    at_M = (token * HEADS + head_M) * PARTS + part
    begun = 1 if UNSPLIT else complete
    is_there_M = ok_M & (begun < states)
    before = load_sums(sums, accs, at_M * states, ok_M & ((complete > 0) | UNSPLIT), ok_D, PADDED_DIM, DIM)
    state = load_sums(sums, accs, at_M * states + begun, is_there_M, ok_D, PADDED_DIM, DIM)

    pages, path = page_table + token // nodes * stride_row, paths + token * stride_path
    for start in range(base, end, BLOCK_N):
        if start == block_end:
            before, state, block, block_end = next_kv_block(before, state, block, MIN_KV_BLOCK, DOUBLINGS)
        key_N = start + n
        ok_N, is_own_N = key_N < end, key_N >= length
        page_N = tl.load(pages + key_N // PAGE_SIZE, mask=ok_N & (is_own_N == 0), other=0)
        own_N = tl.load(path + (key_N - length), mask=ok_N & is_own_N, other=0)
        slot_N = tl.where(is_own_N, own_N.to(tl.int64), slots_on(page_N, key_N, PAGE_SIZE))
        state = read_latents(
            q_MD, other_MD, q_MR, latent, rope, slot_N, ok_N, ok_N[None, :] & ok_M[:, None], part, state,
            scale, LATENT_STRIDE, ROPE_STRIDE, DIM, PARTS, ROPE,
        )  # fmt: skip
    store_output(out, lse, at_M, merged_sums(before, state), ok_M, ok_D, DIM)
