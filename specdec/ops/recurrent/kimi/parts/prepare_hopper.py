"""What prepare_triton.py leaves, of blocks of 64 tokens, by a kernel in Gluon for Hopper GPUs.

Pairs of tokens are parted by borders, as pairs_triton.py says, but from blocks of 8 tokens on: a late token fades from the
border on, an early one to it, so that a level is a product of matrices.  Pairs inside of 8 tokens meet in the middle instead:
one side is exp(c_i), the other exp(-c_j), with c the log-decays summed from the 8's second token on, plus half of what they can
be at most.  So that no factor overflows, a log-decay there is -20 at least: exp(-20) is far less than float32 sees beside 1.

A system is solved by substitution, a lane a column of 128 of keys and 128 of values: float32's own sums, without an inverse.

A thread holds 2 channels of 16 tokens that follow each other, and all sums along tokens are made of these tokens' own.

Shapes: as of specdec/ops/recurrent/kimi_delta.py; N: 64 tokens of a block; R: 2 N, keys, then queries; C: K + V columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait
from specdec.ops.recurrent.chunks.prepare_triton import halves
from specdec.ops.recurrent.kimi.parts.block_hopper import (
    by_place,
    columns_layout_of,
    products_of,
    solved,
    store_pair,
    sums_before,
    sums_behind,
    together,
    tokens_of,
)
from specdec.ops.recurrent.shared_triton import EPS, log_decays, strengths
from specdec.ops.recurrent.trees.nodes_hopper import squares

LEAST = gl.constexpr(-20.0)  # of log-decays inside of 8 tokens


@gluon.constexpr_function
def _tokens_layout():
    """[64, 128] of 8 warps."""
    registers = [[0, 1], [1, 0], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(
        registers, [[0, 2 << bit] for bit in range(5)], [[0, 64], [16, 0], [32, 0]], [], [64, 128]
    )


@gluon.jit(do_not_specialize=["B"])
def kimi_prepare_hopper_kernel(
    y, a, b,  # [T, 2 H K + H V], [T, H K], [T, H]
    A_log, dt_bias,  # [H], [H K]
    cu,  # [B + 1]
    after,  # [B]
    keys, queries, added, values, reads, ends,  # see prepare_triton.py
    B, T, stride_y, stride_a, stride_b,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, N: gl.constexpr, SEARCH: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    h, number = gl.program_id(0), gl.program_id(1)
    tokens: gl.constexpr = _tokens_layout()
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    begin, end = tokens_of(number, cu, after, B, N, SEARCH, num_warps)
    if begin == end:
        return
    begin, T = begin.to(gl.int64), T.to(gl.int64)
    count, y, a = (end - begin).to(gl.int32), y + begin * stride_y + h * K, a + begin * stride_a + h * K

    # Lengths, strengths, values.
    length_smem = gl.allocate_shared_memory(gl.float32, [2 * N], flat)  # of keys, then of queries
    by_row: gl.constexpr = gl.SliceLayout(1, rows)
    n_N, c_K = gl.arange(0, N, by_row), gl.arange(0, K, gl.SliceLayout(0, rows))
    q_NK = gl.load(y + (n_N * stride_y)[:, None] + c_K[None, :], mask=(n_N < count)[:, None], other=0.0)
    k_NK = gl.load(y + H * K + (n_N * stride_y)[:, None] + c_K[None, :], mask=(n_N < count)[:, None], other=0.0)
    length_smem.slice(0, N).store(gl.rsqrt(squares(k_NK) + EPS))
    length_smem.slice(N, N).store(gl.rsqrt(squares(q_NK) + EPS) * K**-0.5)

    # From here on a thread holds tokens that follow each other.
    of_token: gl.constexpr = gl.SliceLayout(1, tokens)
    n_N, k_K = gl.arange(0, N, of_token), gl.arange(0, K, gl.SliceLayout(0, tokens))
    ok_N1 = (n_N < count)[:, None]
    a_NK = gl.load(a + (n_N * stride_a)[:, None] + k_K[None, :], mask=ok_N1, other=0.0)
    q_NK = gl.load(y + (n_N * stride_y)[:, None] + k_K[None, :], mask=ok_N1, other=0.0)
    k_NK = gl.load(y + H * K + (n_N * stride_y)[:, None] + k_K[None, :], mask=ok_N1, other=0.0)
    decay_NK = gl.where(ok_N1, log_decays(a_NK, gl.load(A_log + h), gl.load(dt_bias + h * K + k_K)[None, :]), 0.0)

    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left_high = gl.allocate_shared_memory(gl.bfloat16, [2 * N, K], tiled)
    left_low = gl.allocate_shared_memory(gl.bfloat16, [2 * N, K], tiled)
    right_high = gl.allocate_shared_memory(gl.bfloat16, [N, K], tiled)
    right_low = gl.allocate_shared_memory(gl.bfloat16, [N, K], tiled)
    between: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, N, 16])
    i_R1 = (gl.arange(0, 2 * N, gl.SliceLayout(1, between)) % N)[:, None]
    j_1N = gl.arange(0, N, gl.SliceLayout(0, between))[None, :]

    # Pairs inside of 8 tokens.
    inner_NK = gl.where(n_N[:, None] % 8 == 0, 0.0, gl.maximum(decay_NK, LEAST))
    inner_NK = together(sums_before(by_place(inner_NK), 8), tokens) - 3.5 * LEAST
    less_NK = gl.exp(inner_NK)
    store_pair(k_NK.to(gl.float32) * less_NK, q_NK.to(gl.float32) * less_NK, left_high, left_low)
    high_NK, low_NK = halves(k_NK.to(gl.float32) * gl.exp(-inner_NK))
    right_high.store(high_NK)
    right_low.store(low_NK)
    before = sums_before(by_place(decay_NK), 8)
    sums: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    even_smem = gl.allocate_shared_memory(gl.float32, [N // 16, K], sums)  # of every other 8 tokens
    odd_smem = gl.allocate_shared_memory(gl.float32, [N // 16, K], sums)
    even_smem.store(before[7])
    odd_smem.store(before[15])
    totals = even_smem._reinterpret(gl.float32, [N // 16, K], flat), odd_smem._reinterpret(gl.float32, [N // 16, K], flat)
    fence_async_shared()
    barrier()
    pairs_RN = products_of(left_high, left_low, right_high, right_low, N, between)
    pairs_RN = gl.where((i_R1 // 8 == j_1N // 8) & (i_R1 >= j_1N), pairs_RN, 0.0)

    # Those that a border parts.  A loop, for fewer instructions: see launch.py.
    before_NK, behind_NK = together(before, tokens), together(sums_behind(by_place(decay_NK), 8), tokens)
    for level in range(3, 6):
        is_late_N1 = (((n_N >> level) & 1) == 1)[:, None]
        less_NK = gl.exp(gl.where(is_late_N1, before_NK, behind_NK))
        barrier()
        store_pair(k_NK.to(gl.float32) * less_NK, q_NK.to(gl.float32) * less_NK, left_high, left_low)
        fence_async_shared()
        barrier()
        of_level_RN = products_of(left_high, left_low, left_high.slice(0, N, 0), left_low.slice(0, N, 0), N, between)
        is_pair_RN = ((i_R1 >> (level + 1)) == (j_1N >> (level + 1))) & (((i_R1 >> level) & 1) == 1)
        pairs_RN = gl.where(is_pair_RN & (((j_1N >> level) & 1) == 0), of_level_RN, pairs_RN)
        beside_NK = _beside(totals, n_N // 8, level - 3, tokens)
        before_NK += gl.where(is_late_N1, beside_NK, 0.0)
        behind_NK += gl.where(is_late_N1, 0.0, beside_NK)

    # What meets the state.
    own_N, of_all = h.to(gl.int64) * T + begin + n_N, H * T * K
    to_NK = (own_N * K)[:, None] + k_K[None, :]
    total_K = _total(totals, 0, tokens)
    for number_of_8 in gl.static_range(1, N // 8):
        total_K += _total(totals, number_of_8, tokens)
    gl.store(ends + (h.to(gl.int64) * gl.num_programs(1) + number) * K + k_K, gl.exp(total_K))
    beta_N = strengths(gl.load(b + (begin + n_N) * stride_b + h, mask=n_N < count, other=0.0))
    faded_NK, k_length_N1 = gl.exp(before_NK), length_smem.slice(0, N).load(of_token)[:, None]
    q_length_N1 = length_smem.slice(N, N).load(of_token)[:, None]
    gl.store(queries + to_NK, (q_NK.to(gl.float32) * q_length_N1 * faded_NK).to(gl.bfloat16), mask=ok_N1)
    unit_NK = k_NK.to(gl.float32) * k_length_N1
    high_NK, low_NK = halves(unit_NK * gl.exp(behind_NK))
    gl.store(added + to_NK, high_NK, mask=ok_N1)
    gl.store(added + of_all + to_NK, low_NK, mask=ok_N1)

    # The system, and its right sides.
    scale_smem = gl.allocate_shared_memory(gl.float32, [2 * N], flat)
    scale_smem.slice(0, N).store(-beta_N * length_smem.slice(0, N).load(of_token))
    scale_smem.slice(N, N).store(length_smem.slice(N, N).load(of_token))
    barrier()
    scale_R, length_N = scale_smem.load(gl.SliceLayout(1, between)), length_smem.slice(0, N).load(gl.SliceLayout(0, between))
    pairs_RN *= scale_R[:, None] * length_N[None, :]
    r_R = gl.arange(0, 2 * N, gl.SliceLayout(1, between))
    to_RN = ((h.to(gl.int64) * T + begin + r_R - N) * N)[:, None] + j_1N
    gl.store(reads + to_RN, pairs_RN.to(gl.bfloat16), mask=((r_R >= N) & (r_R - N < count))[:, None] & (j_1N >= 0))
    by_column = gl.allocate_shared_memory(gl.float32, [N, 2 * N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    lanes: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [4, num_warps // 4], [0, 1])  # so that stores lie side by side
    by_column.store(gl.permute(gl.convert_layout(pairs_RN, lanes), (1, 0)))
    right_smem = gl.allocate_shared_memory(gl.float32, [N, K + V], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    v_NV = gl.load(y + (2 * H * K + n_N * stride_y)[:, None] + k_K[None, :], mask=ok_N1, other=0.0)
    right_smem.slice(0, K, 1).store(unit_NK * faded_NK * -beta_N[:, None])
    right_smem.slice(K, V, 1).store(v_NV.to(gl.float32) * beta_N[:, None])
    barrier()
    coefficients = by_column._reinterpret(gl.float32, [N * 8, 16], flat)
    right_rows = right_smem._reinterpret(gl.float32, [N, K + V], flat)
    right_blocks = right_smem._reinterpret(gl.float32, [4, 16, K + V], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    columns: gl.constexpr = columns_layout_of(num_warps)
    s_S, c_C = gl.arange(0, 16, gl.SliceLayout(1, columns)), gl.arange(0, K + V, gl.SliceLayout(0, columns))
    to_SC = ((h.to(gl.int64) * T + begin + s_S) * K)[:, None] + (c_C % K)[None, :]
    for block in range(4):
        x_SC = solved(right_blocks, right_rows, coefficients, block, columns)
        high_SC, low_SC = halves(x_SC)
        ok_S1, at_SC = (16 * block + s_S < count)[:, None], to_SC + block * (16 * K)
        gl.store(keys + at_SC, high_SC, mask=ok_S1 & (c_C < K)[None, :])
        gl.store(keys + of_all + at_SC, low_SC, mask=ok_S1 & (c_C < K)[None, :])
        gl.store(values + at_SC, x_SC, mask=ok_S1 & (c_C >= K)[None, :])


@gluon.jit
def _total(totals, number: gl.constexpr, layout: gl.constexpr):
    """[K]: the sum of a block of 8 tokens."""
    return totals[number % 2].index(number // 2).load(gl.SliceLayout(0, layout))


@gluon.jit
def _beside(totals, number_N, step, layout: gl.constexpr):
    """[N, K]: the sum of the block beside each token's own, of 2^step times 8 tokens.  number_N: of each one's 8 tokens."""
    wanted_N1, sums_NK = ((number_N >> step) ^ 1)[:, None], gl.zeros([64, 128], gl.float32, layout)
    for number in gl.static_range(8):
        sums_NK += gl.where(wanted_N1 == (number >> step), _total(totals, number, layout)[None, :], 0.0)
    return sums_NK
