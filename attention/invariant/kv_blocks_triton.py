"""Paged attention in which the order of every sum is fixed by absolute positions: a query's result depends on its keys alone.

states_triton.py defines KV blocks and states.  A query's state over one KV block is a sum over steps of BLOCK_N keys, in order
of position, and the KV blocks' states are merged from the first to the last.  So it does not matter which program computes
which KV
block: `kv_blocks_kernel` gives each one to a program of its own, or lets one program compute all of them (UNSPLIT).  Keys that
a query may not read add exactly 0.

A draft tree's nodes read keys of their own at the same positions.  `kv_blocks_kernel` then stops at the last multiple of
BLOCK_N before the tree (TREE), and `merge_kv_blocks_kernel` merges the KV blocks that are complete.  `path_kernel` goes on from
the state of the incomplete one: for each node it takes the key at position p from the node's own path where p is in the tree.
So a node's sums are those of a plain decoding step.  Where there are many nodes, a program computes several of them in one
tile.

latents_triton.py has the same kernels for latents.

Order of chained launches (specdec/ops/launch.py): before gdc_wait, kv_blocks_kernel reads the page table, lengths and first
keys, as the paged kernel does, and it lets the next kernel start after its own wait.

Shapes: M rows of a tile (queries x heads of a group), N keys of a step, D head dim, R rows, T queries, H heads, K kv heads, S
    states.
"""

import triton
import triton.language as tl

from specdec.attention.invariant.states_triton import (
    add_keys,
    empty_state,
    kv_block_of,
    kv_block_start,
    load_sums,
    merged_sums,
    next_kv_block,
    store_output,
    store_sums,
)
from specdec.attention.kernels.paged_triton import LOG2E, capped, own_part
from specdec.attention.kernels.tables_triton import slots_on


@triton.jit
def read_keys(q_MD, k_ND, v_ND, visible_MN, state, scale, softcap, SOFTCAP: tl.constexpr):
    """`add_keys` for ordinary heads."""
    s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    if SOFTCAP:
        return add_keys(capped(s_MN * scale, softcap), v_ND, visible_MN, state, LOG2E)
    else:
        return add_keys(s_MN, v_ND, visible_MN, state, scale * LOG2E)


@triton.jit(
    do_not_specialize=["stride_row", "states", "tiles"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q", "starts"],
)
def kv_blocks_kernel(
    q,  # [T, H, D], or a KEY_PARTS-th of D
    kv,  # [slots, 2, K, D]; the values begin stride_v elements after the keys
    page_table,  # [R, W] int32
    cache_seqlens,  # [R] int32
    cu_seqlens_q,  # [R + 1] int32
    starts,  # [T] int32: the first key that each query reads
    out,  # [T, H, D], any float type; written if UNSPLIT and not TREE
    lse,  # [T, H] float32, likewise
    accs,  # [T, H, S, D] float32: written otherwise
    sums,  # [T, H, S, 2] float32, likewise
    scale,
    softcap,
    stride_qt,
    stride_qh,
    stride_slot,
    stride_v,
    stride_kv_head,
    stride_row,
    states,  # S
    tiles,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEY_PARTS: tl.constexpr,  # see paged_triton.py
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
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
    kv_head, row = (tl.program_id(0) // tiles) % KV_HEADS, tl.program_id(0) // tiles // KV_HEADS
    first = tl.load(cu_seqlens_q + row, cache_modifier=".cg")
    queries = tl.load(cu_seqlens_q + row + 1, cache_modifier=".cg") - first
    length = tl.load(cache_seqlens + row, cache_modifier=".cg")
    gqa_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M = gqa_M // GROUP
    head_M = kv_head * GROUP + gqa_M % GROUP
    ok_M = query_M < queries
    end = length
    if CAUSAL:  # keys up to the tile's last query
        end = length - tl.maximum(queries - 1 - (tile * BLOCK_M + BLOCK_M - 1) // GROUP, 0)
    if TREE:
        end = length // BLOCK_N * BLOCK_N
    end = tl.maximum(tl.where(tile * BLOCK_M < queries * GROUP, end, 0), 0)
    begin, start_M = end * 0, query_M * 0
    if HAS_STARTS:
        start_M = tl.load(starts + first + query_M, mask=ok_M, other=2147483647, cache_modifier=".cg")
        begin = tl.minimum(tl.maximum(tl.min(start_M, 0), 0), end) // BLOCK_N * BLOCK_N
        start_M = tl.where(ok_M, tl.maximum(start_M, 0), 0)
    block = kv_block_of(begin, MIN_KV_BLOCK, DOUBLINGS)
    if not UNSPLIT:  # the last KV blocks are the largest, so they start first
        block += tl.num_programs(1) - 1 - tl.program_id(1)
    low, block_end = kv_block_start(block, MIN_KV_BLOCK, DOUBLINGS), kv_block_start(block + 1, MIN_KV_BLOCK, DOUBLINGS)
    low = tl.maximum(low, begin)
    high = end if UNSPLIT else tl.minimum(block_end, end)
    pages = page_table + row.to(tl.int64) * stride_row
    kv += kv_head.to(tl.int64) * stride_kv_head
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, PADDED_DIM)
    # Page numbers are read one step ahead, so that the loads of a step's keys can start at once.
    page_N = tl.load(pages + (low + n) // PAGE_SIZE, mask=low + n < high, other=0, cache_modifier=".cg")

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    ok_D = d < HEAD_DIM
    token_M = (first + query_M).to(tl.int64)
    at_MD, ok_MD = own_part(gqa_M % GROUP, d, GROUP, HEAD_DIM, KEY_PARTS)
    at_MD += (token_M * stride_qt + head_M * stride_qh)[:, None]
    q_MD = tl.load(q + at_MD, mask=ok_MD & ok_M[:, None], other=0.0)
    last_M = length - (queries - query_M) if CAUSAL else query_M * 0 + (length - 1)  # the last key that each query reads
    state = empty_state(BLOCK_M, PADDED_DIM)
    if UNSPLIT:  # the state over the KV blocks before this one
        before = state
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key_N = start + n
        ok_N = key_N < high
        slot_N = slots_on(page_N, key_N, PAGE_SIZE)
        page_N = tl.load(pages + (key_N + BLOCK_N) // PAGE_SIZE, mask=key_N + BLOCK_N < high, other=0)
        at_ND = kv + (slot_N * stride_slot)[:, None] + d[None, :]
        ok_ND = ok_N[:, None] & ok_D[None, :]  # also for values: an unwritten slot may hold NaN, and 0 * NaN is NaN
        k_ND, v_ND = tl.load(at_ND, mask=ok_ND, other=0.0), tl.load(at_ND + stride_v, mask=ok_ND, other=0.0)
        visible_MN = ok_N[None, :] & (key_N[None, :] <= last_M[:, None]) & (key_N[None, :] >= start_M[:, None])
        if UNSPLIT:
            if start == block_end:
                before, state, block, block_end = next_kv_block(before, state, block, MIN_KV_BLOCK, DOUBLINGS)
        state = read_keys(q_MD, k_ND, v_ND, visible_MN, state, scale, softcap, SOFTCAP)

    at_M = token_M * (KV_HEADS * GROUP) + head_M
    if not UNSPLIT:  # a query's states are counted from the KV block of its own first key; empty ones before it come last
        state_M = block - kv_block_of(start_M, MIN_KV_BLOCK, DOUBLINGS)
        state_M = tl.where(state_M < 0, state_M + states, state_M)
        store_sums(sums, accs, at_M * states + state_M, state, ok_M, ok_D, HEAD_DIM)
    elif TREE:  # two states: all KV blocks that are complete, and the one in which the tree begins
        if end == block_end:
            before = merged_sums(before, state)
            state = tl.full([BLOCK_M], -float("inf"), tl.float32), state[1], state[2]
        store_sums(sums, accs, at_M * 2, before, ok_M, ok_D, HEAD_DIM)
        store_sums(sums, accs, at_M * 2 + 1, state, ok_M, ok_D, HEAD_DIM)
    else:
        store_output(out, lse, at_M, merged_sums(before, state), ok_M, ok_D, HEAD_DIM)


@triton.jit(
    do_not_specialize=["stride_row", "stride_path", "states", "nodes"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "paths", "path_lens", "starts"],
)
def path_kernel(
    q,  # as in kv_blocks_kernel
    kv,
    page_table,  # [R, W] int32
    cache_seqlens,  # [R] int32: the position of each tree's root
    paths,  # [T, X] int32: the slots of each node's path, from the root to itself
    path_lens,  # [T] int32
    starts,  # [T] int32: the first key that each query reads
    accs,  # [T, H, S, D] float32: what kv_blocks_kernel and merge_kv_blocks_kernel left
    sums,  # [T, H, S, 2] float32
    out,  # [T, H, D], any float type
    lse,  # [T, H] float32
    scale,
    softcap,
    stride_qt,
    stride_qh,
    stride_slot,
    stride_v,
    stride_kv_head,
    stride_row,
    stride_path,
    states,  # S
    nodes,  # of a tree
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNSPLIT: tl.constexpr,
    NODES: tl.constexpr,  # that a program computes, one after the other
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KV_BLOCK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = (nodes + NODES - 1) // NODES
    row, first, kv_head = tl.program_id(0) // tiles, tl.program_id(0) % tiles * NODES, tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gqa_M = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    node_M, head_M = gqa_M // GROUP, kv_head * GROUP + gqa_M % GROUP
    ok_M = (node_M < NODES) & (first + node_M < nodes)
    token_M = row.to(tl.int64) * nodes + first + node_M
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, PADDED_DIM)
    ok_D = d < HEAD_DIM
    length = tl.load(cache_seqlens + row)
    begin_M = node_M * 0
    if HAS_STARTS:
        begin_M = tl.maximum(tl.load(starts + token_M, mask=ok_M, other=0), 0)
    base = length // BLOCK_N * BLOCK_N
    block = kv_block_of(base, MIN_KV_BLOCK, DOUBLINGS)
    block_end = kv_block_start(block + 1, MIN_KV_BLOCK, DOUBLINGS)
    complete_M = block - kv_block_of(begin_M, MIN_KV_BLOCK, DOUBLINGS)  # they are merged in the first state
    at_MD, ok_MD = own_part(gqa_M % GROUP, d, GROUP, HEAD_DIM, KEY_PARTS)
    at_MD += (token_M * stride_qt + head_M * stride_qh)[:, None]
    q_MD = tl.load(q + at_MD, mask=ok_MD & ok_M[:, None], other=0.0)
    at_M = token_M * (KV_HEADS * GROUP) + head_M
    begun_M = complete_M * 0 + 1 if UNSPLIT else complete_M
    is_there_M = ok_M & (begun_M >= 0) & (begun_M < states)
    before = load_sums(sums, accs, at_M * states, ok_M & ((complete_M > 0) | UNSPLIT), ok_D, PADDED_DIM, HEAD_DIM)
    state = load_sums(sums, accs, at_M * states + begun_M, is_there_M, ok_D, PADDED_DIM, HEAD_DIM)

    pages = page_table + row.to(tl.int64) * stride_row
    kv += kv_head.to(tl.int64) * stride_kv_head
    token = row.to(tl.int64) * nodes + first
    last = tl.max(length + tl.load(path_lens + token_M, mask=ok_M, other=0), 0)
    for start in range(base, last, BLOCK_N):
        if start == block_end:
            before, state, block, block_end = next_kv_block(before, state, block, MIN_KV_BLOCK, DOUBLINGS)
        key_N = start + n
        is_own_N = key_N >= length
        for node in range(NODES):  # the states of all others stay as they are, bit for bit
            end = length + tl.load(path_lens + token + node, mask=first + node < nodes, other=-2147483648)
            ok_N = key_N < end
            page_N = tl.load(pages + key_N // PAGE_SIZE, mask=ok_N & (is_own_N == 0), other=0)
            own_N = tl.load(paths + (token + node) * stride_path + (key_N - length), mask=ok_N & is_own_N, other=0)
            slot_N = tl.where(is_own_N, own_N.to(tl.int64), slots_on(page_N, key_N, PAGE_SIZE))
            at_ND = kv + (slot_N * stride_slot)[:, None] + d[None, :]
            ok_ND = ok_N[:, None] & ok_D[None, :]
            k_ND, v_ND = tl.load(at_ND, mask=ok_ND, other=0.0), tl.load(at_ND + stride_v, mask=ok_ND, other=0.0)
            visible_MN = ok_N[None, :] & (key_N[None, :] >= begin_M[:, None]) & (ok_M & (node_M == node))[:, None]
            state = read_keys(q_MD, k_ND, v_ND, visible_MN, state, scale, softcap, SOFTCAP)
    store_output(out, lse, at_M, merged_sums(before, state), ok_M, ok_D, HEAD_DIM)
