"""What a tree's nodes have to do with each other in the gated delta rule, on Hopper GPUs: the parts of rule_hopper.py's kernel
that no state enters.  Unlike nodes_triton.py no matrix is inverted here, so that each program does this for itself.

Shapes: as of rule_hopper.py.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specdec.ops.hopper import barrier
from specdec.ops.recurrent.shared_triton import EPS


@gluon.constexpr_function
def nodes_layout(P, num_warps):
    """[P]: each warp holds all nodes."""
    lanes = [[1 << bit] if 1 << bit < P else [0] for bit in range(5)]
    return gl.DistributedLinearLayout([[32]] if P == 64 else [], lanes, [[0]] * (num_warps.bit_length() - 1), [], [P])


@gluon.constexpr_function
def _power_of_two(least):
    return triton.next_power_of_2(least)


@gluon.jit
def nodes_above(parents, N: gl.constexpr, CHAIN: gl.constexpr, P: gl.constexpr, num_warps: gl.constexpr):
    """[P]: parents, or -1."""
    n_P = gl.arange(0, P, nodes_layout(P, num_warps))
    if CHAIN:
        above_P = n_P - 1
    else:
        above_P = gl.load(parents + n_P, mask=n_P < N, other=-1, cache_modifier=".cg").to(gl.int32)
        above_P = gl.where(n_P == 0, -1, above_P)
    return above_P


@gluon.jit
def ancestors(above_P, STEPS: gl.constexpr, P: gl.constexpr, num_warps: gl.constexpr):
    """(which nodes are i or above i, as bits [P]; the nodes 1, 2, 4, ... above i, or -1, [P] each).  above_P: `nodes_above`."""
    layout: gl.constexpr = nodes_layout(P, num_warps)
    n_P = gl.arange(0, P, layout)
    word: gl.constexpr = gl.int64 if P == 64 else gl.int32
    bits_P = gl.full([P], 1, word, layout) << n_P.to(word)
    above = ()
    for _ in gl.static_range(STEPS):
        above = above + (above_P,)  # type: ignore[assignment]
        known_P = gl.maximum(above_P, 0)
        bits_P |= gl.where(above_P >= 0, gl.gather(bits_P, known_P, 0), 0)
        above_P = gl.where(above_P >= 0, gl.gather(above_P, known_P, 0), -1)
    return bits_P, above


@gluon.jit
def load_keys_and_queries(
    y, stride_y, N: gl.constexpr, G: gl.constexpr, K: gl.constexpr, P: gl.constexpr, R: gl.constexpr, layout: gl.constexpr
):
    """[R, K]; zeros of nodes that are not there."""
    r_R, k_K = gl.arange(0, R, gl.SliceLayout(1, layout)), gl.arange(0, K, gl.SliceLayout(0, layout))
    from_R = (r_R % P) * stride_y + gl.where(r_R < P, G * K, 0)
    ok_R = (r_R % P < N) & (r_R < 2 * P)
    return gl.load(y + from_R[:, None] + k_K[None, :], mask=ok_R[:, None], other=0.0)


@gluon.jit
def squares(x_RK):
    """Their sum, for each row."""
    x_RK = x_RK.to(gl.float32)
    return gl.sum(x_RK * x_RK, axis=1)


@gluon.jit
def store_keys(
    y, k_left, stride_y, N: gl.constexpr, G: gl.constexpr, K: gl.constexpr, SHARES: gl.constexpr, UNIT: gl.constexpr,
    layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Stores keys.  Each of a key head's programs stores some of them, which it reads once more.  UNIT: of length 1."""
    ROWS: gl.constexpr = max(2 * num_warps, _power_of_two((N + SHARES - 1) // SHARES))
    n_R = gl.program_id(0) % SHARES + SHARES * gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    k_K, ok_R1 = gl.arange(0, K, gl.SliceLayout(0, layout)), (n_R < N)[:, None]
    key_RK = gl.load(y + (n_R * stride_y)[:, None] + k_K[None, :], mask=ok_R1, other=0.0)
    kept_RK = key_RK.to(gl.float32)
    if UNIT:
        kept_RK *= gl.rsqrt(squares(key_RK) + EPS)[:, None]
    gl.store(k_left + (n_R * (G * K))[:, None] + k_K[None, :], kept_RK, mask=ok_R1)


@gluon.jit
def facts(
    sound_P, summed_P, beta_P, q_length, k_length, bits_P, P: gl.constexpr, R: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """What nodes know of themselves, for all threads: ((scales by row [R], by column [P]) of products between nodes; how far
    these fade [R, P], 0 where j is not above i; -r and f, in shared memory [2 P]; strengths there [P]).
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scale_smem = gl.allocate_shared_memory(gl.float32, [R], flat)
    summed_smem = gl.allocate_shared_memory(gl.float32, [R], flat)
    bits_smem = gl.allocate_shared_memory(bits_P.dtype, [R], flat)
    length_smem = gl.allocate_shared_memory(gl.float32, [P], flat)
    factor_smem = gl.allocate_shared_memory(gl.float32, [2 * P], flat)
    beta_smem = gl.allocate_shared_memory(gl.float32, [P], flat)
    one_P = gl.full([P], 1, bits_P.dtype, bits_P.type.layout)
    own_P = one_P << gl.arange(0, P, bits_P.type.layout).to(bits_P.dtype)
    faded_P = gl.exp(summed_P)
    scale_smem.slice(0, P).store(-beta_P * k_length)
    scale_smem.slice(P, P).store(q_length)
    summed_smem.slice(0, P).store(summed_P)
    summed_smem.slice(P, P).store(summed_P)
    bits_smem.slice(0, P).store(bits_P ^ own_P)
    bits_smem.slice(P, P).store(bits_P)
    length_smem.store(k_length)
    beta_smem.store(beta_P)
    factor_smem.slice(0, P).store(-faded_P * k_length)
    factor_smem.slice(P, P).store(gl.where(sound_P, faded_P * q_length, float("nan")))
    barrier()
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    scale_R, length_P = scale_smem.load(rows), length_smem.load(columns)
    is_above_RP = ((bits_smem.load(rows)[:, None] >> gl.arange(0, P, columns).to(bits_P.dtype)[None, :]) & 1) != 0
    # Of nodes on different branches the difference may be large: it never meets exp.
    is_above_RP = is_above_RP & (scale_R != 0)[:, None] & (length_P != 0)[None, :]
    less_RP = summed_smem.load(rows)[:, None] - summed_smem.slice(0, P).load(columns)[None, :]
    return (scale_R, length_P), gl.exp(gl.where(is_above_RP, less_RP, float("-inf"))), factor_smem, beta_smem


@gluon.jit
def coefficients(values_RP, P: gl.constexpr, R: gl.constexpr):
    """C and A in shared memory, by columns: [P, P / 4, W, 4], with two more of W for 16 nodes.

    Four rows for u lie beside four for outputs: lanes that load 16 bytes of one do not wait for those of the other.
    """
    WAYS: gl.constexpr = R // P
    smem = gl.allocate_shared_memory(gl.float32, [P, P // 4, WAYS, 4], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    smem.store(gl.permute(gl.reshape(values_RP, [WAYS, P // 4, 4, P]), (3, 1, 0, 2)))
    return smem._reinterpret(gl.float32, [P, P // 4, WAYS, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
