"""The gated delta rule over trees in one launch, written in Gluon for Hopper GPUs: nodes_triton.py and rule_triton.py at once.

A program computes some columns of a head's values for a whole tree.  What nodes have to do with each other is cheap enough
for each of a head's programs to compute it again, because no system is inverted: with C = -beta (k k') fade below the
diagonal and A = (q k') fade on it and below,

    u_i = right_i + sum over j < i of C_ij u_j        out_i = f_i (q_i S) + sum over j <= i of A_ij u_j

are two sums over the same u.  A lane holds a column of one of the two, all nodes of it, in registers.  Step j reads u_j, which
is complete by then, from the lane that holds it, and adds it times column j of C or A to all later nodes.  These are float32's
own products, and no warp waits for another one.

Products with a state are exact, too, but for rounding of sums: q and k have 16 bits, and the state is cut into three such
parts.  The tensor cores take these from registers, in the places in which they were loaded; `_states_layout` says how.

The first half comes before the wait, as in rule_triton.py: the state and what nodes left are a round old.

Shapes: as of gated_delta.py; P: nodes that there is room for; W: 2, what a lane holds (0: u, of keys; 1: outputs, of queries);
R: rows of keys, then of queries, 64 at least.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait
from specdec.ops.launch import chained
from specdec.ops.recurrent.gated_delta import Gates
from specdec.ops.recurrent.shared_triton import EPS, log_decays, strengths
from specdec.ops.recurrent.states import LayerStates, TreeSteps


class HopperTiles(NamedTuple):
    """warps: 4 or 8, of 16 columns each.  group: accepted nodes of the pending path that are read at once.

    registers: of a thread, at most; 0: as the compiler likes.  slices: 0: states are cut before the wait; else rows are cut
    after it, in so many parts.
    """

    warps: int = 4
    group: int = 4
    registers: int = 0
    slices: int = 0
    turns: int = 1


@gluon.jit
def tree_rule_hopper_kernel(
    y,  # [B * N, 2 G K + H V]
    a, b,  # [B * N, H]
    A_log, dt_bias,  # [H]
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., G, K], [L, .., H, V], [L, .., H]
    read, write, count,  # [B]
    parents,  # [B, N]
    path,  # [B, E]
    out,  # [B * N, H, V]
    stride_y, stride_a, stride_b, stride_state, stride_k, stride_u, stride_decay,
    N: gl.constexpr, E: gl.constexpr, G: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STEPS: gl.constexpr,
    CHAIN: gl.constexpr, P: gl.constexpr, GROUP: gl.constexpr, SLICES: gl.constexpr, TURNS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    BLOCK_V: gl.constexpr = 16 * num_warps
    BLOCKS: gl.constexpr = V // BLOCK_V
    R: gl.constexpr = max(64, 2 * P)
    states: gl.constexpr = _states_layout(num_warps)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row, h, block = gl.program_id(1).to(gl.int64), gl.program_id(0) // BLOCKS, gl.program_id(0) % BLOCKS
    g = h // (H // G)
    number, accepted = gl.load(read + row, cache_modifier=".cg"), gl.load(count + row, cache_modifier=".cg")
    to_state_SKV = _state_pointers(state + h * K * V + block * BLOCK_V, K, V, BLOCK_V, states)
    raw_SKV = gl.load(to_state_SKV + number * stride_state, cache_modifier=".cg")
    state_SKV = _with_path(
        raw_SKV, k_left + number * stride_k + g * K, u_left + number * stride_u + h * V + block * BLOCK_V,
        decay_left + number * stride_decay + h, path + row * E, accepted, E, G, H, K, V, GROUP, states, num_warps,
    )  # fmt: skip
    bits_P, above = _ancestors(parents + row * N, N, STEPS, CHAIN, P, num_warps)
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 2 * P, 16])
    if SLICES == 0:
        parts = _cut(state_SKV, of_state, num_warps)
    rate, bias = gl.load(A_log + h).to(gl.float32), gl.load(dt_bias + h).to(gl.float32)

    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number = gl.load(write + row)
    nodes: gl.constexpr = _nodes_layout(P, num_warps)
    n_P = gl.arange(0, P, nodes)
    a_P = gl.load(a + row * N * stride_a + h + n_P * stride_a, mask=n_P < N, other=0.0)
    b_P = gl.load(b + row * N * stride_b + h + n_P * stride_b, mask=n_P < N, other=0.0)
    r_R, k_R = gl.arange(0, R, gl.SliceLayout(1, rows)), gl.arange(0, K, gl.SliceLayout(0, rows))
    y += row * N * stride_y
    from_R = (r_R % P) * stride_y + gl.where(r_R < P, G * K, 0)
    ok_R = (r_R % P < N) & (r_R < 2 * P)
    kq_RK = gl.load(y + g * K + from_R[:, None] + k_R[None, :], mask=ok_R[:, None], other=0.0)
    values: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_V, BLOCK_V // 8], [num_warps, 1], [1, 0])
    n_V, v_V = gl.arange(0, P, gl.SliceLayout(1, values)), gl.arange(0, BLOCK_V, gl.SliceLayout(0, values))
    from_V = y + 2 * G * K + h * V + block * BLOCK_V + n_V[:, None] * stride_y + v_V[None, :]
    v_PV = gl.load(from_V, mask=(n_V < N)[:, None], other=0.0)
    gl.store(to_state_SKV + number * stride_state, state_SKV)

    wide_RK = kq_RK.to(gl.float32)
    squares_R = gl.sum(wide_RK * wide_RK, axis=1)
    kq_smem = gl.allocate_shared_memory(gl.bfloat16, [R, K], gl.NVMMASharedLayout(128, 16, 2))
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [P, BLOCK_V], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    squares_smem = gl.allocate_shared_memory(gl.float32, [R], flat)
    kq_smem.store(kq_RK)
    v_smem.store(v_PV)
    squares_smem.store(squares_R)
    fence_async_shared()
    barrier()
    between: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, P // (num_warps // 4), 16])
    similar_RP = warpgroup_mma(
        kq_smem, kq_smem.slice(0, P, 0).permute((1, 0)), gl.zeros([R, P], gl.float32, between), use_acc=False, is_async=True
    )
    kq_KR = kq_smem.slice(0, 2 * P, 0).permute((1, 0))
    products = gl.zeros([BLOCK_V, 2 * P], gl.float32, of_state)
    if SLICES == 0:
        products = _multiply(parts, kq_KR, products, True)
    else:
        slices = (state_SKV,) if SLICES == 1 else _halves(state_SKV)
        parts = _cut(slices[0], of_state, num_warps)
        products = _multiply(parts, kq_KR.slice(0, K // SLICES), products, True)

    _store_keys(y + G * K + g * K, k_left + number * stride_k + g * K, stride_y, N, G, K, H // G * BLOCKS, rows, num_warps)
    k_squares, q_squares = squares_smem.slice(0, P).load(nodes), squares_smem.slice(P, P).load(nodes)
    decay_P, beta_P = log_decays(a_P, rate, bias), strengths(b_P)
    # Numbers of a node that are not finite may reach those below it alone: `gated_delta.without_broken`.
    sound_P = (q_squares < float("inf")) & (k_squares < float("inf")) & (gl.abs(decay_P) < float("inf")) & (beta_P == beta_P)
    q_length, k_length = gl.rsqrt(q_squares + EPS) * K**-0.5, gl.rsqrt(k_squares + EPS)
    summed_P = gl.where(sound_P, decay_P, 0.0)
    for step in gl.static_range(len(above)):
        more_P = gl.gather(summed_P, gl.maximum(above[step], 0), 0)
        summed_P += gl.where(above[step] >= 0, more_P, 0.0)
    gl.store(decay_left + number * stride_decay + n_P * H + h, summed_P, mask=(n_P < N) & (block == 0))
    beta_P, faded_P = gl.where(sound_P, beta_P, 0.0), gl.exp(summed_P)
    k_length = gl.where(sound_P, k_length, 0.0)
    # By rows of keys, then of queries: what scales products between nodes; log-decays; ancestors.
    scale_smem = gl.allocate_shared_memory(gl.float32, [R], flat)
    summed_smem = gl.allocate_shared_memory(gl.float32, [R], flat)
    bits_smem = gl.allocate_shared_memory(bits_P.dtype, [R], flat)
    length_smem = gl.allocate_shared_memory(gl.float32, [P], flat)
    factor_smem = gl.allocate_shared_memory(gl.float32, [2 * P], flat)
    beta_smem = gl.allocate_shared_memory(gl.float32, [P], flat)
    scale_smem.slice(0, P).store(-beta_P * k_length)
    scale_smem.slice(P, P).store(gl.where(sound_P, q_length, 0.0))
    summed_smem.slice(0, P).store(summed_P)
    summed_smem.slice(P, P).store(summed_P)
    own_P = gl.full([P], 1, bits_P.dtype, nodes) << n_P.to(bits_P.dtype)
    bits_smem.slice(0, P).store(bits_P ^ own_P)
    bits_smem.slice(P, P).store(bits_P)
    length_smem.store(k_length)
    beta_smem.store(beta_P)
    factor_smem.slice(0, P).store(-faded_P * k_length)
    factor_smem.slice(P, P).store(gl.where(sound_P, faded_P * q_length, float("nan")))
    barrier()
    by_row: gl.constexpr = gl.SliceLayout(1, between)
    by_column: gl.constexpr = gl.SliceLayout(0, between)
    scale_R, summed_R, bits_R = scale_smem.load(by_row), summed_smem.load(by_row), bits_smem.load(by_row)
    length_P, summed_P = length_smem.load(by_column), summed_smem.slice(0, P).load(by_column)
    j_P = gl.arange(0, P, by_column).to(bits_P.dtype)
    on_path_RP = ((bits_R[:, None] >> j_P[None, :]) & 1) != 0
    # Of nodes on different branches the difference may be large: it never meets exp.
    fade_RP = gl.exp(gl.where(on_path_RP, summed_R[:, None] - summed_P[None, :], float("-inf")))
    similar_RP = warpgroup_mma_wait(3, deps=(similar_RP,))
    is_sound_RP = on_path_RP & (scale_R != 0)[:, None] & (length_P != 0)[None, :]
    coefficients_RP = gl.where(is_sound_RP, similar_RP * scale_R[:, None] * length_P[None, :] * fade_RP, 0.0)
    WAYS: gl.constexpr = R // P
    # By columns, of which four rows for u lie beside four for outputs: a load of 16 bytes has no conflict of banks.
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    smem = gl.allocate_shared_memory(gl.float32, [P, P // 4, WAYS, 4], cube)
    smem.store(gl.permute(gl.reshape(coefficients_RP, [WAYS, P // 4, 4, P]), (3, 1, 0, 2)))
    coefficients = smem._reinterpret(gl.float32, [P, P // 4, WAYS, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))

    columns: gl.constexpr = _columns_layout(P, num_warps)
    products, _, _, _, _ = warpgroup_mma_wait(0, deps=(products, parts[0], parts[1], parts[2], kq_smem))
    if SLICES == 2:
        parts = _cut(slices[1], of_state, num_warps)
        products = _multiply(parts, kq_KR.slice(K // 2, K // 2), products, False)
        products, _, _, _, _ = warpgroup_mma_wait(0, deps=(products, parts[0], parts[1], parts[2], kq_smem))
    barrier()  # what follows may lie where other warps' products still read keys and queries
    x = gl.permute(gl.reshape(products, [num_warps, 2, 8, 2, P]), (4, 3, 0, 2, 1))
    x = gl.convert_layout(gl.reshape(x, [P, 2, BLOCK_V]), columns)
    factors = factor_smem._reinterpret(gl.float32, [2, P], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    x = _right(x, v_smem, factors, beta_smem, P, num_warps, columns)
    x = _substitute(x, coefficients, P, TURNS, num_warps, columns)
    n = gl.arange(0, P, gl.SliceLayout(1, gl.SliceLayout(2, columns)))[:, None][:, :, None]
    way = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, columns)))[None, :][:, :, None]
    v = gl.arange(0, BLOCK_V, gl.SliceLayout(0, gl.SliceLayout(0, columns)))[None, :][None, :, :]
    to_u, to_out = u_left + number * stride_u + h * V + block * BLOCK_V, out + row * N * H * V + h * V + block * BLOCK_V
    here = way * 0 + v  # in front of what the compiler knows, so that that takes no instruction
    gl.store(to_u + here + n * (H * V), x, mask=(n < N) & (way == 0) & (v >= 0))
    gl.store(to_out + here + n * (H * V), x.to(out.dtype.element_ty), mask=(n < N) & (way == 1) & (v >= 0))


@gluon.constexpr_function
def _states_layout(num_warps):
    """Of [K / 16, 16, V] in memory: a thread holds pairs of columns, of just those rows that it holds of the tensor cores'
    operand.

    The operand is [V, K]: rows of 16 a warp.  Its row 16 w + 8 i + j is column 16 w + 2 j + i of the state: which row is which
    column does not matter, as long as nobody else says otherwise.
    """
    registers = [[0, 0, 1], [0, 1, 0], [0, 8, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    warps = [[0, 0, 16], [0, 0, 32], [0, 0, 64]][: num_warps.bit_length() - 1]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8, 16, 16 * num_warps])


@gluon.constexpr_function
def _columns_layout(P, num_warps):
    """[P, 2, V]: a lane holds all nodes of a column, of u or of outputs."""
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 1, 0]]
    warps = [[0, 0, 16], [0, 0, 32], [0, 0, 64]][: num_warps.bit_length() - 1]
    return gl.DistributedLinearLayout(
        [[1 << bit, 0, 0] for bit in range(P.bit_length() - 1)], lanes, warps, [], [P, 2, 16 * num_warps]
    )


@gluon.constexpr_function
def _coefficients_layout(P, num_warps):
    """[P / 4, 2, 4]: each lane holds all of one of the two."""
    registers = [[0, 0, 1], [0, 0, 2], *([1 << bit, 0, 0] for bit in range(P.bit_length() - 3))]
    warps = [[0, 0, 0]] * (num_warps.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, [[0, 0, 0]] * 4 + [[0, 1, 0]], warps, [], [P // 4, 2, 4])


@gluon.constexpr_function
def _factors_layout(P, num_warps):
    """[2, P]: each lane holds all of one of the two."""
    warps = [[0, 0]] * (num_warps.bit_length() - 1)
    registers = [[0, 1 << bit] for bit in range(P.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[0, 0]] * 4 + [[1, 0]], warps, [], [2, P])


@gluon.constexpr_function
def _nodes_layout(P, num_warps):
    """[P]: each warp holds all nodes."""
    warps = [[0]] * (num_warps.bit_length() - 1)
    lanes = [[1 << bit] if 1 << bit < P else [0] for bit in range(5)]
    return gl.DistributedLinearLayout([[32]] if P == 64 else [], lanes, warps, [], [P])


@gluon.jit
def _state_pointers(state, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, layout: gl.constexpr):
    """[K / 16, 16, V]: of few pointers the others are so far away as the compiler knows."""
    s = gl.arange(0, K // 16, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None][:, :, None]
    k = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :][:, :, None]
    v = gl.arange(0, BLOCK_V, gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :][None, :, :]
    return state + k * V + v + s * (16 * V)


@gluon.jit
def _with_path(
    raw_SKV, k_left, u_left, decay_left, path, accepted, E: gl.constexpr, G: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The state with what the pending path adds.  All loads for GROUP nodes are on their way before the state is needed."""
    smem = gl.allocate_shared_memory(gl.float32, [GROUP, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    end = gl.load(path + accepted - 1, mask=accepted > 0, other=0, cache_modifier=".cg")
    last = gl.load(decay_left + end * H, mask=accepted > 0, other=0.0, cache_modifier=".cg")
    left = _read_path(k_left, u_left, decay_left, path, 0, accepted, G, H, K, V, GROUP, layout, num_warps)
    state_SKV = _add_path(raw_SKV * gl.exp(last), left, last, smem, K, GROUP, layout)
    if E > GROUP:
        for first in range(GROUP, accepted, GROUP):
            left = _read_path(k_left, u_left, decay_left, path, first, accepted, G, H, K, V, GROUP, layout, num_warps)
            barrier()
            state_SKV = _add_path(state_SKV, left, last, smem, K, GROUP, layout)
    return state_SKV


@gluon.jit
def _read_path(
    k_left, u_left, decay_left, path, first, accepted, G: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    GROUP: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """(log-decays, u [V], keys [GROUP, K]) of GROUP accepted nodes from number `first` on; zeros where none is accepted."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    e_E, k = gl.arange(0, GROUP, gl.SliceLayout(1, by_row)), gl.arange(0, K, gl.SliceLayout(0, by_row))
    v_V = gl.arange(0, raw_width(layout), gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    ok_E = first + e_E < accepted
    node_E = gl.load(path + first + e_E, mask=ok_E, other=0, cache_modifier=".cg")
    nodes, decays, added = (), (), ()
    for e in gl.static_range(GROUP):
        nodes = nodes + (gl.load(path + first + e, mask=first + e < accepted, other=0, cache_modifier=".cg"),)
    key_EK = gl.load(k_left + (node_E * (G * K))[:, None] + k[None, :], mask=ok_E[:, None], other=0.0, cache_modifier=".cg")
    for e in gl.static_range(GROUP):
        ok = first + e < accepted
        decays = decays + (gl.load(decay_left + nodes[e] * H, mask=ok, other=float("inf"), cache_modifier=".cg"),)
        added = added + (gl.load(u_left + nodes[e] * (H * V) + v_V, mask=ok, other=0.0, cache_modifier=".cg"),)
    return decays, added, key_EK


@gluon.constexpr_function
def raw_width(layout):
    return layout.shape[-1]


@gluon.jit
def _add_path(state_SKV, left, last, smem, K: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """The state with what those nodes add, faded to the end of the path."""
    decays, added, key_EK = left
    smem.store(key_EK)
    barrier()
    keys = smem._reinterpret(gl.float32, [GROUP, K // 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for e in gl.static_range(GROUP):
        key_SK = keys.index(e).load(gl.SliceLayout(2, layout))
        u_V = added[e] * gl.exp(last - decays[e])
        state_SKV += key_SK[:, :, None] * u_V[None, :][None, :, :]
    return state_SKV


@gluon.jit
def _ancestors(parents, N: gl.constexpr, STEPS: gl.constexpr, CHAIN: gl.constexpr, P: gl.constexpr, num_warps: gl.constexpr):
    """(which nodes are i or above i, as bits [P]; the nodes 1, 2, 4, ... above i, or -1, [P] each)."""
    layout: gl.constexpr = _nodes_layout(P, num_warps)
    n_P = gl.arange(0, P, layout)
    if CHAIN:
        above_P = n_P - 1
    else:
        above_P = gl.load(parents + n_P, mask=n_P < N, other=-1, cache_modifier=".cg").to(gl.int32)
        above_P = gl.where(n_P == 0, -1, above_P)
    word: gl.constexpr = gl.int64 if P == 64 else gl.int32
    bits_P = gl.full([P], 1, word, layout) << n_P.to(word)
    above = ()
    for _ in gl.static_range(STEPS):
        above = above + (above_P,)
        known_P = gl.maximum(above_P, 0)
        bits_P |= gl.where(above_P >= 0, gl.gather(bits_P, known_P, 0), 0)
        above_P = gl.where(above_P >= 0, gl.gather(above_P, known_P, 0), -1)
    return bits_P, above


@gluon.jit
def _store_keys(
    y, k_left, stride_y, N: gl.constexpr, G: gl.constexpr, K: gl.constexpr, SHARES: gl.constexpr, layout: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Stores keys, of length 1.  Each of a key head's programs stores some of them, which it reads again."""
    ROWS: gl.constexpr = max(2 * num_warps, _power_of_two((N + SHARES - 1) // SHARES))
    n_R = gl.program_id(0) % SHARES + SHARES * gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    k, ok_R1 = gl.arange(0, K, gl.SliceLayout(0, layout)), (n_R < N)[:, None]
    key_RK = gl.load(y + (n_R * stride_y)[:, None] + k[None, :], mask=ok_R1, other=0.0).to(gl.float32)
    key_RK *= gl.rsqrt(gl.sum(key_RK * key_RK, axis=1) + EPS)[:, None]
    gl.store(k_left + (n_R * (G * K))[:, None] + k[None, :], key_RK, mask=ok_R1)


@gluon.constexpr_function
def _power_of_two(least):
    return triton.next_power_of_2(least)


@gluon.jit
def _cut(state_SKV, of_state: gl.constexpr, num_warps: gl.constexpr):
    """Three parts of 16 bits whose sum is the state, each as the tensor cores' left operand [V, K]: see `_states_layout`."""
    K: gl.constexpr = 16 * state_SKV.shape[0]
    ordered = gl.permute(gl.reshape(state_SKV, [K, num_warps, 8, 2]), (1, 3, 2, 0))
    left: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    whole_VK = gl.convert_layout(gl.reshape(ordered, [16 * num_warps, K]), left, assert_trivial=True)
    first_VK = _high_bits(whole_VK)
    rest_VK = whole_VK - first_VK
    second_VK = _high_bits(rest_VK)
    return first_VK.to(gl.bfloat16), second_VK.to(gl.bfloat16), (rest_VK - second_VK).to(gl.bfloat16)


@gluon.jit
def _halves(state_SKV):
    """The first and the last rows of a state."""
    S: gl.constexpr = state_SKV.shape[0]
    K: gl.constexpr = state_SKV.shape[1]
    return gl.split(gl.permute(gl.reshape(state_SKV, [2, S // 2, K, state_SKV.shape[2]]), (1, 2, 3, 0)))


@gluon.jit
def _multiply(parts, kq_KR, products, IS_FIRST: gl.constexpr):
    """products plus those of a state's rows.  The tensor cores may still be at work."""
    products = warpgroup_mma(parts[0], kq_KR, products, use_acc=not IS_FIRST, is_async=True)
    products = warpgroup_mma(parts[1], kq_KR, products, is_async=True)
    return warpgroup_mma(parts[2], kq_KR, products, is_async=True)


@gluon.jit
def _high_bits(x):
    """Those that bfloat16 has.  Three times as many are all that float32 has."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _right(x, v_smem, factors, betas, P: gl.constexpr, num_warps: gl.constexpr, columns: gl.constexpr):
    """[P, 2, V]: what u is but for its own sum; outputs without theirs.  What is not finite is NaN in its own output alone.

    x: products with the state, of keys and of queries.  factors: -r and f.
    """
    by_node: gl.constexpr = gl.SliceLayout(2, columns)
    factor = gl.permute(factors.load(_factors_layout(P, num_warps)), (1, 0))
    x *= gl.convert_layout(factor, by_node, assert_trivial=True)[:, :, None]
    v = v_smem.load(gl.SliceLayout(1, columns)).to(gl.float32)
    beta = betas.load(gl.SliceLayout(1, by_node))
    right = gl.where(gl.abs(v) < float("inf"), v, 0.0)[:, None, :] + x
    right = gl.where(gl.abs(right) < float("inf"), right, 0.0) * beta[:, None][:, :, None]
    way = gl.arange(0, 2, gl.SliceLayout(0, by_node))[None, :][:, :, None]
    return gl.where(way == 0, right, x + (v - v)[:, None, :])


@gluon.jit
def _substitute(
    x, coefficients, P: gl.constexpr, TURNS: gl.constexpr, num_warps: gl.constexpr, columns: gl.constexpr
):
    """[P, 2, V]: u and outputs.  Which node a register holds is known to the compiler, and costs no instruction."""
    by_node: gl.constexpr = gl.SliceLayout(2, columns)
    n = gl.arange(0, P, gl.SliceLayout(1, by_node))[:, None][:, :, None]
    way = gl.arange(0, 2, gl.SliceLayout(0, by_node))[None, :][:, :, None]
    for first in gl.static_range(0, P, TURNS):
        rows = ()
        for e in gl.static_range(TURNS):
            bits = gl.where((n == first + e) & (way == 0), x.to(gl.int32, bitcast=True), 0)
            row_V = gl.reduce_or(gl.reduce_or(bits, 0), 0).to(gl.float32, bitcast=True)
            for before in gl.static_range(e):
                row_V += _coefficient(coefficients, first + before, first + e, num_warps) * rows[before]
            rows = rows + (row_V,)
        for e in gl.static_range(TURNS):
            column = coefficients.index(first + e).slice(0, 2, 1).load(_coefficients_layout(P, num_warps))
            column = gl.reshape(gl.permute(column, (0, 2, 1)), [P, 2])
            column = gl.convert_layout(column, by_node, assert_trivial=True)
            x = gl.where(n >= first + e, x + column[:, :, None] * rows[e][None, :][None, :, :], x)
    return x


@gluon.jit
def _coefficient(coefficients, j: gl.constexpr, i: gl.constexpr, num_warps: gl.constexpr):
    """C_ij, for all lanes."""
    layout: gl.constexpr = _alone_layout(num_warps)
    four = coefficients.index(j).slice(i // 4, 1, 0).slice(0, 1, 1).load(layout)
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :][None, :, :]
    bits = gl.where(number == i % 4, four.to(gl.int32, bitcast=True), 0)
    return gl.reduce_or(gl.reduce_or(gl.reduce_or(bits, 0), 0), 0).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _alone_layout(num_warps):
    """[1, 1, 4]: each lane holds all."""
    warps = [[0, 0, 0]] * (num_warps.bit_length() - 1)
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2]], [[0, 0, 0]] * 5, warps, [], [1, 1, 4])


def launch_tree_rule_hopper(
    y_TC: Tensor, gates: Gates, layer: LayerStates, steps: TreeSteps, out_THV: Tensor, tiles: HopperTiles
) -> None:
    """Writes outputs, and all that `gated_delta.tree_outputs` writes, of 2 to 64 nodes."""
    (B, N), E = steps.parents_BN.shape, steps.path_BE.shape[1]
    (_, H, K, V), G = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    assert y_TC.dtype == torch.bfloat16 and K == 128 and V % (16 * tiles.warps) == 0 and 2 <= N <= 64
    assert y_TC.stride(0) % 8 == 0 and y_TC.data_ptr() % 16 == 0
    tree_rule_hopper_kernel[(H * (V // (16 * tiles.warps)), B)](
        y_TC, *gates, layer.state_PHKV, layer.k_LNGK, layer.u_LNHV, layer.decay_LNH, steps.read_B, steps.write_B, steps.count_B,
        steps.parents_BN, steps.path_BE, out_THV, y_TC.stride(0), gates.a_TH.stride(0), gates.b_TH.stride(0),
        layer.state_PHKV.stride(0), layer.k_LNGK.stride(0), layer.u_LNHV.stride(0), layer.decay_LNH.stride(0),
        N=N, E=E, G=G, H=H, K=K, V=V, STEPS=steps.max_depth.bit_length(), CHAIN=steps.is_chain, P=max(16, triton.next_power_of_2(N)),
        GROUP=triton.next_power_of_2(min(E, tiles.group)), SLICES=tiles.slices, TURNS=tiles.turns, num_warps=tiles.warps, **({"maxnreg": tiles.registers} if tiles.registers else {}),
        **chained(y_TC.device),
    )  # fmt: skip
