"""Parts of prepare_hopper.py's kernel: which block a program has, sums along tokens, products, and the system's solution.

Shapes: as of prepare_hopper.py; S: 16 tokens that follow each other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from specdec.ops.recurrent.chunks.prepare_triton import halves


@gluon.jit
def tokens_of(number, cu, after, B, N: gl.constexpr, SEARCH: gl.constexpr, num_warps: gl.constexpr):
    """As `tokens_of_block` in chunks/prepare_triton.py: (a block's first token, where it ends)."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])
    before, begin, end = number * 0, number * 0, number * 0
    p_S, o_S = gl.arange(0, SEARCH, gl.SliceLayout(1, layout)), gl.arange(0, SEARCH, gl.SliceLayout(0, layout))
    for first in range(0, B, SEARCH):
        begin_S, tokens_S, kept_S = _part(first + p_S, cu, after, B)
        _, other_tokens_S, other_kept_S = _part(first + o_S, cu, after, B)
        kept_blocks_S = gl.cdiv(kept_S, N)
        blocks_S = kept_blocks_S + gl.cdiv(tokens_S - kept_S, N)
        other_S = gl.cdiv(other_kept_S, N) + gl.cdiv(other_tokens_S - other_kept_S, N)
        in_front_S = gl.sum(gl.where(o_S[None, :] < p_S[:, None], other_S[None, :], 0), 1)
        index_S = number - before - in_front_S
        is_mine_S, is_late_S = (index_S >= 0) & (index_S < blocks_S), index_S >= kept_blocks_S
        first_S = gl.where(is_late_S, kept_S + (index_S - kept_blocks_S) * N, index_S * N)
        end_S = gl.minimum(first_S + N, gl.where(is_late_S, tokens_S, kept_S))
        begin += gl.sum(gl.where(is_mine_S, begin_S + first_S, 0), 0)
        end += gl.sum(gl.where(is_mine_S, begin_S + end_S, 0), 0)
        before += gl.sum(blocks_S, 0)
    return begin, end


@gluon.jit
def _part(part_S, cu, after, B):
    """(where it begins, its tokens, after how many of them a state is kept); zeros of no part."""
    begin_S = gl.load(cu + part_S, mask=part_S < B, other=0)
    end_S = gl.load(cu + part_S + 1, mask=part_S < B, other=0)
    return begin_S, end_S - begin_S, gl.load(after + part_S, mask=part_S < B, other=0)


@gluon.jit
def by_place(x_NK):
    """x of each place in blocks of 16 tokens, 16 times [N / 16, K]: of registers that a thread holds, a name for each."""
    K: gl.constexpr = x_NK.shape[1]
    M: gl.constexpr = x_NK.shape[0] // 16
    parts = (gl.permute(gl.reshape(x_NK, [M, 16, K]), (0, 2, 1)),)
    for bit in gl.static_range(4):
        halved = ()
        for part in gl.static_range(1 << bit):
            first, second = gl.split(gl.permute(gl.reshape(parts[part], [M, K, 2, 8 >> bit]), (0, 1, 3, 2)))
            halved = halved + (first, second)  # type: ignore[assignment]
        parts = halved  # type: ignore[assignment]
    places = ()
    for part in gl.static_range(16):
        places = places + (gl.reshape(parts[part], [M, K]),)  # type: ignore[assignment]
    return places


@gluon.jit
def together(parts, layout: gl.constexpr):
    """What `by_place` took apart."""
    M: gl.constexpr = parts[0].shape[0]
    K: gl.constexpr = parts[0].shape[1]
    for bit in gl.static_range(4):
        joined = ()
        for part in gl.static_range(8 >> bit):
            first, second = parts[2 * part], parts[2 * part + 1]
            if bit == 0:
                first, second = gl.reshape(first, [M, K, 1]), gl.reshape(second, [M, K, 1])
            pair = gl.permute(gl.join(first, second), (0, 1, 3, 2))
            joined = joined + (gl.reshape(pair, [M, K, 2 << bit]),)  # type: ignore[assignment]
        parts = joined
    return gl.convert_layout(gl.reshape(gl.permute(parts[0], (0, 2, 1)), [16 * M, K]), layout, assert_trivial=True)


@gluon.jit
def sums_before(parts, S: gl.constexpr):
    """In blocks of S tokens: sums of each one and those before it, by place."""
    sums = ()
    for e in gl.static_range(16):
        if e % S == 0:
            total = parts[e]
        else:
            total += parts[e]
        sums = sums + (total,)  # type: ignore[assignment]
    return sums


@gluon.jit
def sums_behind(parts, S: gl.constexpr):
    """In blocks of S tokens: sums of those behind each one, by place."""
    sums, total = (), gl.zeros_like(parts[0])
    for e in gl.static_range(16):
        if e % S == 0:
            total = gl.zeros_like(parts[0])
        sums = (total,) + sums  # type: ignore[assignment]
        total += parts[15 - e]
    return sums


@gluon.jit
def store_pair(k_NK, q_NK, high_smem, low_smem):
    """Keys and queries, each as two numbers of 16 bits."""
    N: gl.constexpr = k_NK.shape[0]
    high_NK, low_NK = halves(k_NK)
    high_smem.slice(0, N, 0).store(high_NK)
    low_smem.slice(0, N, 0).store(low_NK)
    high_NK, low_NK = halves(q_NK)
    high_smem.slice(N, N, 0).store(high_NK)
    low_smem.slice(N, N, 0).store(low_NK)


@gluon.jit
def products_of(left_high, left_low, right_high, right_low, N: gl.constexpr, layout: gl.constexpr):
    """[R, N]: of all rows with each other, without the product of the lower halves."""
    high_KN, low_KN = right_high.permute((1, 0)), right_low.permute((1, 0))
    sums_RN = gl.zeros([2 * N, N], gl.float32, layout)
    sums_RN = warpgroup_mma(left_low, high_KN, sums_RN, use_acc=False, is_async=True)
    sums_RN = warpgroup_mma(left_high, low_KN, sums_RN, is_async=True)
    sums_RN = warpgroup_mma(left_high, high_KN, sums_RN, is_async=True)
    return warpgroup_mma_wait(0, deps=(sums_RN,))


@gluon.constexpr_function
def columns_layout_of(num_warps):
    """[16, 256]: a lane holds all tokens of a column."""
    registers = [[1 << bit, 0] for bit in range(4)]
    lanes = [[0, 1 << bit] for bit in range(5)]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 32 << bit] for bit in range(3)], [], [16, 256])


@gluon.jit
def solved(right_blocks, right_rows, coefficients, block, layout: gl.constexpr):
    """[S, C], a block's rows of the solution x of x_i = right_i + sum over j < i of C_ij x_j.

    They take the right sides' place.  Blocks before are solved.  A lane reads no column but its own.  coefficients: C_ij of 16
    nodes i each: 8 for each j.
    """
    n_S1 = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    x_SC = right_blocks.index(block).load(layout)
    for first in range(0, 16 * block, 4):
        for e in gl.static_range(4):
            c_S = coefficients.index(8 * (first + e) + block).load(gl.SliceLayout(1, layout))
            x_SC += c_S[:, None] * right_rows.index(first + e).load(gl.SliceLayout(0, layout))[None, :]
    for e in gl.static_range(15):
        c_S = coefficients.index(8 * (16 * block + e) + block).load(gl.SliceLayout(1, layout))
        x_SC = gl.where(n_S1 > e, x_SC + c_S[:, None] * _row(x_SC, n_S1, e), x_SC)
    right_blocks.index(block).store(x_SC)
    return x_SC


@gluon.jit
def _row(x_SC, n_S1, e: gl.constexpr):
    """[1, C].  The compiler knows which register this is: see `substituted` in trees/columns_hopper.py."""
    bits_SC = gl.where(n_S1 == e, x_SC.to(gl.int32, bitcast=True), 0)
    return gl.reduce_or(bits_SC, 0).to(gl.float32, bitcast=True)[None, :]
