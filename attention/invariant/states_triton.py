"""KV blocks, and the softmax states over them: what all kernels of invariant attention share.

A sequence's keys are cut into KV blocks, which begin at fixed absolute positions (`kv_block_start`).  Their size grows with the
position, so that a short prefix is spread over the whole GPU and a long one makes few states: 16 KV blocks of MIN_KV_BLOCK
keys, 16 of twice as many, and so on, DOUBLINGS times.  Kernels walk through a KV block in steps of BLOCK_N keys.  A state is
(base-2 maximum, sum of weights, sum of weighted values), unnormalised, so that nothing is rounded in between.

Two kernels give the same bits only if they compile to the same instructions.  So all arithmetic on states stands in the
functions `add_keys` and `merged_sums`, products have the same shape and number of warps, and wherever a compiler could choose
to fuse, a fused multiply-add is written out.

Shapes: M rows of a tile (queries x heads of a group), N keys of a step, D width of a value, R rows, T queries, H heads, S
    states.
"""

import triton
import triton.language as tl

from specdec.attention.invariant import plan
from specdec.attention.kernels.paged_triton import store_lse

BLOCKS_PER_SIZE = tl.constexpr(plan.BLOCKS_PER_SIZE)


@triton.jit
def kv_block_start(block, MIN_KV_BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr):
    """The position at which a KV block begins."""
    doubling = tl.minimum(block // BLOCKS_PER_SIZE, DOUBLINGS)
    times = (block * 0 + 1) << doubling
    return (times - 1) * (BLOCKS_PER_SIZE * MIN_KV_BLOCK) + (block - doubling * BLOCKS_PER_SIZE) * (times * MIN_KV_BLOCK)


@triton.jit
def kv_block_of(key, MIN_KV_BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr):
    """The KV block in which a position lies."""
    doubling = key * 0
    for i in tl.static_range(1, DOUBLINGS + 1):
        doubling += (key >= (BLOCKS_PER_SIZE * MIN_KV_BLOCK) * ((1 << i) - 1)).to(tl.int32)
    times = (key * 0 + 1) << doubling
    return doubling * BLOCKS_PER_SIZE + (key - (times - 1) * (BLOCKS_PER_SIZE * MIN_KV_BLOCK)) // (times * MIN_KV_BLOCK)


@triton.jit
def complete_kv_blocks(
    token, cache_seqlens, starts, nodes, HAS_STARTS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_KV_BLOCK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
):  # fmt: skip
    """How many KV blocks of a tree's node are complete at the last multiple of BLOCK_N before the tree; may be negative."""
    length = tl.load(cache_seqlens + token // nodes)
    first = length * 0
    if HAS_STARTS:
        first = kv_block_of(tl.maximum(tl.load(starts + token), 0), MIN_KV_BLOCK, DOUBLINGS)
    return kv_block_of(length // BLOCK_N * BLOCK_N, MIN_KV_BLOCK, DOUBLINGS) - first


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, PADDED_DIM: tl.constexpr):
    """The state over no key: (base-2 maximum [M], sum of weights [M], sum of weighted values [M, D])."""
    top_M, total_M = tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    return top_M, total_M, tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)


@triton.jit
def add_keys(s_MN, v_ND, visible_MN, state, factor):
    """A state with one more step of keys.

    s_MN: products of queries and keys, which times `factor` are logarithms of weights in base 2.
    If a query may read none of these keys, its state stays as it is, bit for bit.
    """
    top_M, total_M, acc_MD = state
    s_MN = tl.where(visible_MN, s_MN, -float("inf"))
    new_M = tl.maximum(top_M, tl.max(s_MN, 1) * factor)
    shift_M = tl.where(new_M == -float("inf"), 0.0, new_M)  # -inf: the query has read no key yet
    p_MN = tl.exp2(tl.fma(s_MN, tl.zeros_like(s_MN) + factor, tl.zeros_like(s_MN) - shift_M[:, None]))
    decay_M = tl.exp2(top_M - shift_M)
    total_M = tl.fma(total_M, decay_M, tl.sum(p_MN, 1))
    acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD * decay_M[:, None], input_precision="ieee")
    return new_M, total_M, acc_MD


@triton.jit
def merged_sums(state, following):
    """The state over two sets of keys.  An empty state, of maximum -inf and sums 0, changes nothing, bit for bit."""
    top_M, total_M, acc_MD = state
    next_top_M, next_total_M, next_acc_MD = following
    new_M = tl.maximum(top_M, next_top_M)
    shift_M = tl.where(new_M == -float("inf"), 0.0, new_M)
    keep_M, weight_M = tl.exp2(top_M - shift_M), tl.exp2(next_top_M - shift_M)
    total_M = tl.fma(next_total_M, weight_M, total_M * keep_M)
    acc_MD = tl.fma(next_acc_MD, tl.zeros_like(acc_MD) + weight_M[:, None], acc_MD * keep_M[:, None])
    return new_M, total_M, acc_MD


@triton.jit
def next_kv_block(before, state, block, MIN_KV_BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr):
    """At a KV block's end: (the state over all KV blocks so far, the empty one of the next, its number, its end)."""
    before, block = merged_sums(before, state), block + 1
    return before, empty_state(state[2].shape[0], state[2].shape[1]), block, kv_block_start(block + 1, MIN_KV_BLOCK, DOUBLINGS)


@triton.jit
def store_output(out, lse, at_M, state, ok_M, ok_D, HEAD_DIM: tl.constexpr):
    """The average of values and the natural log of the sum of weights; 0 and -inf where no key was read."""
    top_M, total_M, acc_MD = state
    safe_M = store_lse(lse, at_M, top_M, total_M, ok_M, 0.0)
    at_MD = at_M[:, None] * HEAD_DIM + tl.arange(0, acc_MD.shape[1])[None, :]
    tl.store(out + at_MD, (acc_MD / safe_M[:, None]).to(out.dtype.element_ty), mask=ok_M[:, None] & ok_D[None, :])


@triton.jit
def store_sums(sums, accs, state_M, state, ok_M, ok_D, HEAD_DIM: tl.constexpr):
    """Stores states as they are.  Nobody reads the values of an empty state."""
    top_M, total_M, acc_MD = state
    tl.store(sums + 2 * state_M, top_M, mask=ok_M)
    tl.store(sums + 2 * state_M + 1, total_M, mask=ok_M)
    at_MD = state_M[:, None] * HEAD_DIM + tl.arange(0, acc_MD.shape[1])[None, :]
    tl.store(accs + at_MD, acc_MD, mask=(ok_M & (top_M > -float("inf")))[:, None] & ok_D[None, :])


@triton.jit
def load_sums(sums, accs, state_M, ok_M, ok_D, PADDED_DIM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """States as they were stored; empty ones where ok_M is False."""
    top_M = tl.load(sums + 2 * state_M, mask=ok_M, other=-float("inf"))
    total_M = tl.load(sums + 2 * state_M + 1, mask=ok_M, other=0.0)
    at_MD = state_M[:, None] * HEAD_DIM + tl.arange(0, PADDED_DIM)[None, :]
    acc_MD = tl.load(accs + at_MD, mask=ok_M[:, None] & ok_D[None, :], other=0.0)
    return top_M, total_M, tl.where((top_M > -float("inf"))[:, None], acc_MD, 0.0)


@triton.jit(do_not_specialize=["states", "nodes"], do_not_specialize_on_alignment=["cache_seqlens", "starts"])
def merge_kv_blocks_kernel(
    accs,  # [T, H, S, D] float32
    sums,  # [T, H, S, 2] float32
    cache_seqlens,  # [R] int32, if TREE
    starts,  # [T] int32, if TREE and HAS_STARTS
    out,  # [T, H, D], any float type, if not TREE
    lse,  # [T, H] float32, likewise
    states,  # S
    nodes,  # of a tree
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    TREE: tl.constexpr,  # merge the KV blocks that are complete before a node's tree, into the first state
    BLOCK_N: tl.constexpr,
    MIN_KV_BLOCK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    CHUNK: tl.constexpr,  # states whose loads are in flight together
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at_M = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    ok_D = tl.arange(0, PADDED_DIM) < HEAD_DIM
    count = states
    if TREE:
        count = complete_kv_blocks(
            tl.program_id(0) // HEADS, cache_seqlens, starts, nodes, HAS_STARTS, BLOCK_N, MIN_KV_BLOCK, DOUBLINGS
        )
    merged = empty_state(1, PADDED_DIM)
    at = count * 0
    while at < count:
        following = merged
        for i in tl.static_range(CHUNK):
            ok_M = at + i + at_M * 0 < count
            following = load_sums(sums, accs, at_M * states + at + i, ok_M, ok_D, PADDED_DIM, HEAD_DIM)
            merged = merged_sums(merged, following)
        # A query reads every KV block from its first key's to its last key's, so after an empty state there are only empty
        # ones.
        at = tl.where(tl.max(following[0]) == -float("inf"), count, at + CHUNK)
    if TREE:
        store_sums(sums, accs, at_M * states, merged, at_M * 0 + count > 0, ok_D, HEAD_DIM)
    else:
        store_output(out, lse, at_M, merged, at_M >= 0, ok_D, HEAD_DIM)
