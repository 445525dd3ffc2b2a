"""Paged attention in which the order of every sum is fixed by absolute positions: a query's result depends on its keys alone.

states_triton.py says what leaves and states are.  A query's state over one leaf is a sum over blocks of BLOCK_N keys, in order
of position, and leaves are joined from the first to the last.  Who computes which leaf does not matter then: `leaves_kernel`
gives each leaf to a program of its own, or lets one program compute all of them (ONE).  Keys that a query may not read add
exactly 0.

A draft tree's nodes read keys of their own at the same positions.  `leaves_kernel` then stops at the last border of a block
before the tree (TREE), `join_kernel` joins the leaves that are complete, and `path_kernel` goes on from the state of the leaf
that is not: for each node it takes the key at position p from the node's own path where p is in the tree.  So a node's sums are
those of a plain decoding step.  Where there are many nodes a program computes several, as its tile has room for their states.

latents_triton.py has the same kernels for latents.

Order of chained launches (specdec/ops/launch.py): before gdc_wait, leaves_kernel reads the page table, lengths and first keys,
as the paged kernel does, and it lets the next kernel start after its own wait.

Shapes: M packed queries x heads of a tile, N keys of a block, D head dim, R rows, T queries, H heads, K kv heads, S states.
"""

import triton
import triton.language as tl

from specdec.attention.invariant.states_triton import (
    add_block,
    empty_state,
    first_key,
    joined_sums,
    leaf_of,
    load_sums,
    next_leaf,
    store_answer,
    store_sums,
)
from specdec.attention.kernels.paged_triton import LOG2E, capped, own_part
from specdec.attention.kernels.tables_triton import slots_on


@triton.jit
def read_block(q_MD, k_ND, v_ND, visible_MN, state, scale, softcap, SOFTCAP: tl.constexpr):
    """`add_block` for ordinary heads."""
    s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    if SOFTCAP:
        return add_block(capped(s_MN * scale, softcap), v_ND, visible_MN, state, LOG2E)
    else:
        return add_block(s_MN, v_ND, visible_MN, state, scale * LOG2E)


@triton.jit(
    do_not_specialize=["stride_row", "states", "tiles"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q", "starts"],
)
def leaves_kernel(
    q,  # [T, H, D], or a KEY_PARTS-th of D
    kv,  # [slots, 2, K, D]; the values begin stride_v numbers after the keys
    page_table,  # [R, W] int32
    cache_seqlens,  # [R] int32
    cu_seqlens_q,  # [R + 1] int32
    starts,  # [T] int32: the first key that each query reads
    out,  # [T, H, D], any float type; written if ONE and not TREE
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
    TREE: tl.constexpr,  # stop before the block that the tree's first key lies in
    ONE: tl.constexpr,  # a program computes all leaves of its queries
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    OCTAVES: tl.constexpr,
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
    packed_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M = packed_M // GROUP
    head_M = kv_head * GROUP + packed_M % GROUP
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
    leaf = leaf_of(begin, LEAST, OCTAVES)
    if not ONE:  # the last leaves are the longest, so they start first
        leaf += tl.num_programs(1) - 1 - tl.program_id(1)
    low, border = first_key(leaf, LEAST, OCTAVES), first_key(leaf + 1, LEAST, OCTAVES)
    low = tl.maximum(low, begin)
    high = end if ONE else tl.minimum(border, end)
    pages = page_table + row.to(tl.int64) * stride_row
    kv += kv_head.to(tl.int64) * stride_kv_head
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, PADDED_DIM)
    # A block's page numbers are read one block ahead, so that the loads of its keys can start at once.
    page_N = tl.load(pages + (low + n) // PAGE_SIZE, mask=low + n < high, other=0, cache_modifier=".cg")

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    ok_D = d < HEAD_DIM
    token_M = (first + query_M).to(tl.int64)
    at_MD, ok_MD = own_part(packed_M % GROUP, d, GROUP, HEAD_DIM, KEY_PARTS)
    at_MD += (token_M * stride_qt + head_M * stride_qh)[:, None]
    q_MD = tl.load(q + at_MD, mask=ok_MD & ok_M[:, None], other=0.0)
    last_M = length - (queries - query_M) if CAUSAL else query_M * 0 + (length - 1)  # the last key that each query reads
    state = empty_state(BLOCK_M, PADDED_DIM)
    if ONE:  # the state over the leaves before this one
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
        if ONE:
            if start == border:
                before, state, leaf, border = next_leaf(before, state, leaf, LEAST, OCTAVES)
        state = read_block(q_MD, k_ND, v_ND, visible_MN, state, scale, softcap, SOFTCAP)

    at_M = token_M * (KV_HEADS * GROUP) + head_M
    if not ONE:  # a query's states are counted from the leaf of its own first key; empty ones of leaves before it come last
        state_M = leaf - leaf_of(start_M, LEAST, OCTAVES)
        state_M = tl.where(state_M < 0, state_M + states, state_M)
        store_sums(sums, accs, at_M * states + state_M, state, ok_M, ok_D, HEAD_DIM)
    elif TREE:  # two states: all leaves that are complete, and the one in which the tree begins
        if end == border:
            before = joined_sums(before, state)
            state = tl.full([BLOCK_M], -float("inf"), tl.float32), state[1], state[2]
        store_sums(sums, accs, at_M * 2, before, ok_M, ok_D, HEAD_DIM)
        store_sums(sums, accs, at_M * 2 + 1, state, ok_M, ok_D, HEAD_DIM)
    else:
        store_answer(out, lse, at_M, joined_sums(before, state), ok_M, ok_D, HEAD_DIM)


@triton.jit(
    do_not_specialize=["stride_row", "stride_path", "states", "nodes"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "paths", "path_lens", "starts"],
)
def path_kernel(
    q,  # as in leaves_kernel
    kv,
    page_table,  # [R, W] int32
    cache_seqlens,  # [R] int32: the position of each tree's root
    paths,  # [T, X] int32: the slots of each node's path, from the root to itself
    path_lens,  # [T] int32
    starts,  # [T] int32: the first key that each query reads
    accs,  # [T, H, S, D] float32: what leaves_kernel and join_kernel left
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
    ONE: tl.constexpr,
    NODES: tl.constexpr,  # that a program computes, one after the other
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    OCTAVES: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = (nodes + NODES - 1) // NODES
    row, first, kv_head = tl.program_id(0) // tiles, tl.program_id(0) % tiles * NODES, tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    packed_M = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    node_M, head_M = packed_M // GROUP, kv_head * GROUP + packed_M % GROUP
    ok_M = (node_M < NODES) & (first + node_M < nodes)
    token_M = row.to(tl.int64) * nodes + first + node_M
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, PADDED_DIM)
    ok_D = d < HEAD_DIM
    length = tl.load(cache_seqlens + row)
    begin_M = node_M * 0
    if HAS_STARTS:
        begin_M = tl.maximum(tl.load(starts + token_M, mask=ok_M, other=0), 0)
    base = length // BLOCK_N * BLOCK_N
    leaf = leaf_of(base, LEAST, OCTAVES)
    border = first_key(leaf + 1, LEAST, OCTAVES)
    complete_M = leaf - leaf_of(begin_M, LEAST, OCTAVES)  # leaves that join_kernel has joined into the first state
    at_MD, ok_MD = own_part(packed_M % GROUP, d, GROUP, HEAD_DIM, KEY_PARTS)
    at_MD += (token_M * stride_qt + head_M * stride_qh)[:, None]
    q_MD = tl.load(q + at_MD, mask=ok_MD & ok_M[:, None], other=0.0)
    at_M = token_M * (KV_HEADS * GROUP) + head_M
    begun_M = complete_M * 0 + 1 if ONE else complete_M
    is_there_M = ok_M & (begun_M >= 0) & (begun_M < states)
    before = load_sums(sums, accs, at_M * states, ok_M & ((complete_M > 0) | ONE), ok_D, PADDED_DIM, HEAD_DIM)
    state = load_sums(sums, accs, at_M * states + begun_M, is_there_M, ok_D, PADDED_DIM, HEAD_DIM)

    pages = page_table + row.to(tl.int64) * stride_row
    kv += kv_head.to(tl.int64) * stride_kv_head
    token = row.to(tl.int64) * nodes + first
    last = tl.max(length + tl.load(path_lens + token_M, mask=ok_M, other=0), 0)
    for start in range(base, last, BLOCK_N):
        if start == border:
            before, state, leaf, border = next_leaf(before, state, leaf, LEAST, OCTAVES)
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
            state = read_block(q_MD, k_ND, v_ND, visible_MN, state, scale, softcap, SOFTCAP)
    store_answer(out, lse, at_M, joined_sums(before, state), ok_M, ok_D, HEAD_DIM)
