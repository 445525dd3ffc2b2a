"""Substitution by columns, for the delta rules' kernels for Hopper GPUs: a lane holds all nodes of one column of u or outputs.

rule_hopper.py says how it goes.  This module knows neither where the nodes' products come from nor how anything fades.

Shapes: as of rule_hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def columns_layout(P, num_warps):
    """[P, W, V]: a lane holds all nodes of a column."""
    registers = [[1 << bit, 0, 0] for bit in range(P.bit_length() - 1)]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 1, 0]]
    warps = [[0, 0, 16], [0, 0, 32], [0, 0, 64]][: num_warps.bit_length() - 1]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [P, 2, 16 * num_warps])


@gluon.constexpr_function
def _ways_layout(P, num_warps):
    """[P / 4, W, 4]: a lane holds what belongs to its columns."""
    registers = [[0, 0, 1], [0, 0, 2], *([1 << bit, 0, 0] for bit in range(P.bit_length() - 3))]
    lanes, warps = [[0, 0, 0]] * 4 + [[0, 1, 0]], [[0, 0, 0]] * (num_warps.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [P // 4, 2, 4])


@gluon.constexpr_function
def _four_layout(num_warps):
    """[1, 1, 4]: each lane holds all."""
    warps = [[0, 0, 0]] * (num_warps.bit_length() - 1)
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2]], [[0, 0, 0]] * 5, warps, [], [1, 1, 4])


@gluon.jit
def _by_node(four, layout: gl.constexpr):
    """[P, W] of what was loaded as [P / 4, W, 4]."""
    pairs = gl.reshape(gl.permute(four, (0, 2, 1)), [4 * four.shape[0], 2])
    return gl.convert_layout(pairs, gl.SliceLayout(2, layout), assert_trivial=True)


@gluon.jit
def weights_of(smem, P: gl.constexpr, num_warps: gl.constexpr, layout: gl.constexpr):
    """[P, W]: what one node's u is multiplied by for all nodes."""
    return _by_node(smem.load(_ways_layout(P, num_warps)), layout)


@gluon.jit
def places(P: gl.constexpr, layout: gl.constexpr):
    """(nodes [P, 1, 1], W [1, W, 1])."""
    n = gl.arange(0, P, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None][:, :, None]
    return n, gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :][:, :, None]


@gluon.jit
def right_sides(x_PWV, v_smem, factor_smem, beta_smem, P: gl.constexpr, num_warps: gl.constexpr, layout: gl.constexpr):
    """[P, W, V]: u, and outputs, without the sums over other nodes.  What is not finite is NaN in its own output alone.

    x_PWV: products of keys, and of queries, with the state.
    """
    factors = factor_smem._reinterpret(gl.float32, [2, P // 4, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    x_PWV *= _by_node(factors.permute((1, 0, 2)).load(_ways_layout(P, num_warps)), layout)[:, :, None]
    v_PV = v_smem.load(gl.SliceLayout(1, layout)).to(gl.float32)
    beta_P = beta_smem.load(gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    right_PWV = gl.where(gl.abs(v_PV) < float("inf"), v_PV, 0.0)[:, None, :] + x_PWV
    right_PWV = gl.where(gl.abs(right_PWV) < float("inf"), right_PWV, 0.0) * beta_P[:, None][:, :, None]
    _, way = places(P, layout)
    return gl.where(way == 0, right_PWV, x_PWV + (v_PV - v_PV)[:, None, :])


@gluon.jit
def substituted(x_PWV, coefficients, P: gl.constexpr, TURNS: gl.constexpr, num_warps: gl.constexpr, layout: gl.constexpr):
    """[P, W, V]: u and outputs.  The compiler knows which node a register holds, so that choosing one takes no instruction.

    All lanes solve TURNS nodes by themselves, whose u they need, and wait for each other once for these.
    """
    n, way = places(P, layout)
    for first in gl.static_range(0, P, TURNS):
        solved = ()
        for e in gl.static_range(TURNS):
            bits_PWV = gl.where((n == first + e) & (way == 0), x_PWV.to(gl.int32, bitcast=True), 0)
            u_V = gl.reduce_or(gl.reduce_or(bits_PWV, 0), 0).to(gl.float32, bitcast=True)
            for before in gl.static_range(e):
                u_V += _coefficient(coefficients, first + before, first + e, num_warps) * solved[before]
            solved = solved + (u_V,)  # type: ignore[assignment]
        for e in gl.static_range(TURNS):
            weight_PW = weights_of(coefficients.index(first + e).slice(0, 2, 1), P, num_warps, layout)
            more_PWV = weight_PW[:, :, None] * solved[e][None, :][None, :, :]
            x_PWV = gl.where(n >= first + e, x_PWV + more_PWV, x_PWV)
    return x_PWV


@gluon.jit
def _coefficient(coefficients, j: gl.constexpr, i: gl.constexpr, num_warps: gl.constexpr):
    """C_ij, for all lanes."""
    layout: gl.constexpr = _four_layout(num_warps)
    four = coefficients.index(j).slice(i // 4, 1, 0).slice(0, 1, 1).load(layout)
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :][None, :, :]
    bits = gl.where(number == i % 4, four.to(gl.int32, bitcast=True), 0)
    return gl.reduce_or(gl.reduce_or(gl.reduce_or(bits, 0), 0), 0).to(gl.float32, bitcast=True)


@gluon.jit
def store_columns(x_PWV, to_u, to_out, N, STRIDE: gl.constexpr, layout: gl.constexpr):
    """u and outputs.  The nodes' distances come last, which the compiler puts into the stores."""
    n, way = places(x_PWV.shape[0], layout)
    v = gl.arange(0, x_PWV.shape[2], gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :][None, :, :]
    here, ok = way * 0 + v, (n < N) & (v >= 0)
    gl.store(to_u + here + n * STRIDE, x_PWV, mask=ok & (way == 0))
    gl.store(to_out + here + n * STRIDE, x_PWV.to(to_out.dtype.element_ty), mask=ok & (way == 1))
