"""The parts of ssd_tree_hopper.py's kernel: reading a tree's nodes, and what they have to do with each other.

Shapes: as of ssd_tree_hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma

from specdec.ops.hopper import barrier, copy_rows
from specdec.ops.recurrent.trees.state_hopper import as_operand, high_bits, places


@gluon.jit
def copy_nodes(
    from_q, stride_y, q_smem, k_smem, N: gl.constexpr, G: gl.constexpr, K: gl.constexpr, P: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Sends a group's queries and keys on their way into shared memory.  Zeros of nodes that are not there."""
    n_R = gl.arange(0, P, gl.SliceLayout(1, layout))
    copy_rows(q_smem.slice(0, P, 0), from_q + n_R * stride_y, n_R < N, K, layout)
    copy_rows(k_smem, from_q + G * K + n_R * stride_y, n_R < N, K, layout)
    async_copy.commit_group()


@gluon.jit
def read_values(from_x, stride_y, N: gl.constexpr, P: gl.constexpr, layout: gl.constexpr):
    """[S, 16, V]; zeros of nodes that are not there."""
    s, n, v = places(P, layout)
    n = 16 * s + n
    return gl.load(from_x + n * stride_y + v, mask=n + v * 0 < N, other=0.0)


@gluon.jit
def marked(x_SPV, step_SP1):
    """(values, with NaN in place of those that are not finite, or make no finite u [S, 16, V]; u, with zeros there).

    So an output that such a value goes into is NaN, and `without_marks` reaches no other one.
    """
    wide_SPV = x_SPV.to(gl.float32)
    u_SPV = wide_SPV * step_SP1
    ok_SPV = gl.abs(u_SPV) < float("inf")
    marked_SPV = gl.where(ok_SPV, wide_SPV, float("nan")).to(gl.bfloat16)
    return marked_SPV, gl.where(ok_SPV, u_SPV, 0.0)


@gluon.jit
def without_marks(marked_SPV):
    """Zeros in place of NaN."""
    wide_SPV = marked_SPV.to(gl.float32)
    return gl.where(wide_SPV == wide_SPV, wide_SPV, 0.0).to(gl.bfloat16)


@gluon.jit
def two_parts(state_SKV, products_layout: gl.constexpr, num_warps: gl.constexpr):
    """Two parts of 16 bits whose sum is the state but for its last bits, each as the tensor cores' left operand [V, K]."""
    whole_VK = as_operand(state_SKV, products_layout, num_warps)
    first_VK = high_bits(whole_VK)
    return first_VK.to(gl.bfloat16), (whole_VK - first_VK).to(gl.bfloat16)


@gluon.jit
def multiplied(parts, right_KP, products_VP):
    """Products with a state, at which the tensor cores may still be at work.  products_VP: zeros."""
    products_VP = warpgroup_mma(parts[0], right_KP, products_VP, use_acc=False, is_async=True)
    return warpgroup_mma(parts[1], right_KP, products_VP, is_async=True)


@gluon.jit
def diagonal(similar_RP, P: gl.constexpr, nodes: gl.constexpr):
    """[P], for all warps."""
    layout: gl.constexpr = similar_RP.type.layout
    smem = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i, j = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None], gl.arange(0, P, gl.SliceLayout(0, layout))[None, :]
    smem.store(gl.sum(gl.where(i == j, similar_RP, 0.0), axis=1))
    barrier()
    return smem.slice(0, P).load(nodes)


@gluon.jit
def store_reads(
    similar_RP, summed_smem, step_smem, bits_smem, first_smem, second_smem, P: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Stores A [R, P] as two numbers of 16 bits, of log-decays [R], steps [P] and ancestors [R] in shared memory."""
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    step_P = step_smem.load(columns)
    word: gl.constexpr = gl.int64 if P == 64 else gl.int32
    is_above_RP = ((bits_smem.load(rows)[:, None] >> gl.arange(0, P, columns).to(word)[None, :]) & 1) != 0
    # Nothing goes out of a node that is not sound, whose step is 0.  Of nodes on different branches the difference may be
    # large: it never meets exp.
    is_above_RP = is_above_RP & (gl.arange(0, 64, rows) < P)[:, None] & (step_P != 0)[None, :]
    less_RP = summed_smem.load(rows)[:, None] - summed_smem.slice(0, P).load(columns)[None, :]
    fade_RP = gl.exp(gl.where(is_above_RP, less_RP, float("-inf")))
    reads_RP = gl.where(is_above_RP, similar_RP * fade_RP * step_P[None, :], 0.0)
    first_RP = high_bits(reads_RP)
    first_smem.store(first_RP.to(gl.bfloat16))
    second_smem.store((reads_RP - first_RP).to(gl.bfloat16))


@gluon.jit
def by_node(products_VP, P: gl.constexpr, num_warps: gl.constexpr, layout: gl.constexpr):
    """[S, 16, V], with columns in the state's own order, where the thread that has a product holds it."""
    parts = gl.permute(gl.reshape(products_VP, [num_warps, 2, 8, P]), (3, 0, 2, 1))
    return gl.convert_layout(gl.reshape(parts, [P // 16, 16, 16 * num_warps]), layout, assert_trivial=True)
