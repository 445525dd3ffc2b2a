"""Leaves of a sequence's keys, and the states of softmaxes over them: what all kernels of invariant attention share.

A sequence's keys are cut into leaves, whose borders are absolute positions (`first_key`).  Leaves grow with the position, so
that a short prefix is spread over the whole GPU and a long one makes few states: 16 leaves of LEAST keys, 16 of twice as many,
and so on, OCTAVES times.  A state is (base-2 maximum, sum of weights, sum of weighted values), so that nothing is rounded on
the way.

To give the same bits, two kernels must compile to the same instructions: all arithmetic on states stands in the functions
`add_block` and `joined_sums`, products have the same shape and number of warps, and what a compiler might fuse or not is
written as one fused multiply-add.

Shapes: M packed queries x heads of a tile, N keys of a block, D width of a value, R rows, T queries, H heads, S states.
"""

import triton
import triton.language as tl

from specdec.attention.invariant import plan
from specdec.attention.kernels.paged_triton import store_lse

IN_OCTAVE = tl.constexpr(plan.IN_OCTAVE)


@triton.jit
def first_key(leaf, LEAST: tl.constexpr, OCTAVES: tl.constexpr):
    """The position at which a leaf begins."""
    octave = tl.minimum(leaf // IN_OCTAVE, OCTAVES)
    times = (leaf * 0 + 1) << octave
    return (times - 1) * (IN_OCTAVE * LEAST) + (leaf - octave * IN_OCTAVE) * (times * LEAST)


@triton.jit
def leaf_of(key, LEAST: tl.constexpr, OCTAVES: tl.constexpr):
    """The leaf in which a position lies."""
    octave = key * 0
    for i in tl.static_range(1, OCTAVES + 1):
        octave += (key >= (IN_OCTAVE * LEAST) * ((1 << i) - 1)).to(tl.int32)
    times = (key * 0 + 1) << octave
    return octave * IN_OCTAVE + (key - (times - 1) * (IN_OCTAVE * LEAST)) // (times * LEAST)


@triton.jit
def complete_leaves(
    token, cache_seqlens, starts, nodes, HAS_STARTS: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    OCTAVES: tl.constexpr,
):  # fmt: skip
    """How many leaves of a tree's node are complete at the last border of a block before the tree; may be negative."""
    length = tl.load(cache_seqlens + token // nodes)
    first = length * 0
    if HAS_STARTS:
        first = leaf_of(tl.maximum(tl.load(starts + token), 0), LEAST, OCTAVES)
    return leaf_of(length // BLOCK_N * BLOCK_N, LEAST, OCTAVES) - first


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, PADDED_DIM: tl.constexpr):
    """The state over no key: (base-2 maximum [M], sum of weights [M], sum of weighted values [M, D])."""
    top_M, total_M = tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    return top_M, total_M, tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)


@triton.jit
def add_block(s_MN, v_ND, visible_MN, state, factor):
    """A state with one more block of keys.

    s_MN: products of queries and keys, which times `factor` are logarithms of weights in base 2.
    A block of which a query may read nothing leaves the query's state as it is, bit for bit.
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
def joined_sums(state, following):
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
def next_leaf(before, state, leaf, LEAST: tl.constexpr, OCTAVES: tl.constexpr):
    """At the end of a leaf: (the state over all leaves so far, that over the next one, which leaf it is, where it ends)."""
    before, leaf = joined_sums(before, state), leaf + 1
    return before, empty_state(state[2].shape[0], state[2].shape[1]), leaf, first_key(leaf + 1, LEAST, OCTAVES)


@triton.jit
def store_answer(out, lse, at_M, state, ok_M, ok_D, HEAD_DIM: tl.constexpr):
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
def join_kernel(
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
    TREE: tl.constexpr,  # join the leaves that are complete before a node's tree, into the first state
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    OCTAVES: tl.constexpr,
    CHUNK: tl.constexpr,  # states whose loads are in flight together
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at_M = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    ok_D = tl.arange(0, PADDED_DIM) < HEAD_DIM
    many = states
    if TREE:
        many = complete_leaves(tl.program_id(0) // HEADS, cache_seqlens, starts, nodes, HAS_STARTS, BLOCK_N, LEAST, OCTAVES)
    joined = empty_state(1, PADDED_DIM)
    at = many * 0
    while at < many:
        following = joined
        for i in tl.static_range(CHUNK):
            ok_M = at + i + at_M * 0 < many
            following = load_sums(sums, accs, at_M * states + at + i, ok_M, ok_D, PADDED_DIM, HEAD_DIM)
            joined = joined_sums(joined, following)
        # A query reads every leaf from its first key's to its last key's, so after an empty state there are only empty ones.
        at = tl.where(tl.max(following[0]) == -float("inf"), many, at + CHUNK)
    if TREE:
        store_sums(sums, accs, at_M * states, joined, at_M * 0 + many > 0, ok_D, HEAD_DIM)
    else:
        store_answer(out, lse, at_M, joined, at_M >= 0, ok_D, HEAD_DIM)
