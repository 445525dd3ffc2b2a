"""What a tree's nodes have to do with each other in Kimi's rule, on Hopper GPUs: the parts of rule_hopper.py's kernel that no
state enters.

A lane holds a node, with some of its channels, so that what a node sees of its parent is one shuffle away.  Pairs are walked,
as in pairs_triton.py: what node i sees of its d-th ancestor's key is what its parent sees of its (d - 1)-th ancestor's, once
more faded.  No factor is above 1, whatever the decays are.

Shapes: as of rule_hopper.py; L: ancestors that are looked at before their products are gathered; X: parts of a node's channels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specdec.ops.hopper import barrier
from specdec.ops.recurrent.chunks.prepare_triton import halves


@gluon.constexpr_function
def walks_layout(P, num_warps):
    """[P, 128]: each lane holds a node (two of 64), and channels that lie side by side."""
    row_bits, warp_bits = min(5, P.bit_length() - 1), num_warps.bit_length() - 1
    own = 7 - warp_bits - (5 - row_bits)
    registers = [*([0, 1 << bit] for bit in range(own)), *([[32, 0]] if P == 64 else [])]
    lanes = [*([1 << bit, 0] for bit in range(row_bits)), *([0, 1 << bit] for bit in range(own, own + 5 - row_bits))]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 1 << bit] for bit in range(7 - warp_bits, 7)], [], [P, 128])


@gluon.constexpr_function
def parts_of(P, num_warps):
    """Of a node's channels, each held by a thread of its own."""
    return num_warps * max(1, 32 // P)


@gluon.constexpr_function
def pairs_layout(P, num_warps):
    """[2 P, P]: a lane holds some pairs of a node."""
    bits, warp_bits = 2 * P // num_warps, num_warps.bit_length() - 1
    row_bits = bits.bit_length() - 1
    lanes = [*([1 << bit, 0] for bit in range(row_bits)), *([0, 1 << bit] for bit in range(5 - row_bits))]
    registers = [[0, 1 << bit] for bit in range(5 - row_bits, P.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, [[bits << bit, 0] for bit in range(warp_bits)], [], [2 * P, P])


@gluon.constexpr_function
def _parts_layout(P, X, num_warps):
    """[2 P, X]: a lane holds all parts of a node, of those nodes that it holds in `pairs_layout`."""
    bits, warp_bits = 2 * P // num_warps, num_warps.bit_length() - 1
    row_bits = bits.bit_length() - 1
    lanes = [*([1 << bit, 0] for bit in range(row_bits)), *([[0, 0]] * (5 - row_bits))]
    registers = [[0, 1 << bit] for bit in range(X.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, [[bits << bit, 0] for bit in range(warp_bits)], [], [2 * P, X])


@gluon.jit
def load_channels(x, stride, N: gl.constexpr, K: gl.constexpr, P: gl.constexpr, layout: gl.constexpr):
    """[P, K]; zeros of nodes that are not there."""
    n_P, k_K = gl.arange(0, P, gl.SliceLayout(1, layout)), gl.arange(0, K, gl.SliceLayout(0, layout))
    return gl.load(x + (n_P * stride)[:, None] + k_K[None, :], mask=(n_P < N)[:, None], other=0.0)


@gluon.jit
def store_channels(x_PK, to, stride, N: gl.constexpr, BLOCKS: gl.constexpr, layout: gl.constexpr):
    """Each of a head's programs stores those of every BLOCKS-th node."""
    n_P = gl.arange(0, x_PK.shape[0], gl.SliceLayout(1, layout))
    k_K = gl.arange(0, x_PK.shape[1], gl.SliceLayout(0, layout))
    ok_P = (n_P < N) & (n_P % BLOCKS == gl.program_id(0) % BLOCKS)
    gl.store(to + (n_P * stride)[:, None] + k_K[None, :], x_PK, mask=ok_P[:, None])


@gluon.jit
def by_rows(x_P, layout: gl.constexpr, like_PK):
    """[P, K]: a node's number, for all of its channels."""
    column_P1 = gl.convert_layout(x_P, gl.SliceLayout(1, layout))[:, None]
    return gl.convert_layout(column_P1, layout) + gl.zeros_like(like_PK).to(x_P.dtype)


@gluon.jit
def along_paths(x_P, above):
    """[P]: sums over each node's path."""
    for step in gl.static_range(len(above)):
        more_P = gl.gather(x_P, gl.maximum(above[step], 0), 0)
        x_P += gl.where(above[step] >= 0, more_P, gl.zeros_like(more_P))
    return x_P


@gluon.jit
def channels_along_paths(x_PK, above, layout: gl.constexpr):
    """[P, K]: the same, of each channel."""
    for step in gl.static_range(len(above)):
        at_PK = by_rows(above[step], layout, x_PK)
        more_PK = gl.gather(x_PK, gl.maximum(at_PK, 0), 0)
        x_PK += gl.where(at_PK >= 0, more_PK, 0.0)
    return x_PK


@gluon.jit
def store_halves(x_PK, high_smem, low_smem, first: gl.constexpr):
    """As two numbers of 16 bits."""
    high_PK, low_PK = halves(x_PK)
    high_smem.slice(first, x_PK.shape[0], 0).store(high_PK)
    low_smem.slice(first, x_PK.shape[0], 0).store(low_PK)


@gluon.jit
def walked(
    q_PK, k_PK, less_PK, above_P, depth_P, bits_P, DEPTH: gl.constexpr, P: gl.constexpr, X: gl.constexpr, L: gl.constexpr,
    layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """[2 P, P]: products of each node's key with those of its ancestors, then of its query with these and its own.

    Zeros of all other pairs.  above_P: -1 of the root.  depth_P: the nodes of each one's path.  bits_P: which these are.
    """
    pairs: gl.constexpr = pairs_layout(P, num_warps)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sums_smem = gl.allocate_shared_memory(gl.float32, [L, 2 * P, X], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    depth_smem = gl.allocate_shared_memory(gl.int32, [2 * P], flat)
    bits_smem = gl.allocate_shared_memory(bits_P.dtype, [2 * P], flat)
    own_P = gl.full([P], 1, bits_P.dtype, bits_P.type.layout) << gl.arange(0, P, bits_P.type.layout).to(bits_P.dtype)
    depth_smem.slice(0, P).store(depth_P)
    depth_smem.slice(P, P).store(depth_P)
    bits_smem.slice(0, P).store(bits_P ^ own_P)
    bits_smem.slice(P, P).store(bits_P)
    barrier()
    rows: gl.constexpr = gl.SliceLayout(1, pairs)
    columns: gl.constexpr = gl.SliceLayout(0, pairs)
    is_above_RP = ((bits_smem.load(rows)[:, None] >> gl.arange(0, P, columns).to(bits_P.dtype)[None, :]) & 1) != 0
    apart_RP = depth_smem.load(rows)[:, None] - depth_smem.slice(0, P).load(columns)[None, :]
    apart_RP = gl.where(is_above_RP, apart_RP, -1)
    pairs_RP = gl.zeros([2 * P, P], gl.float32, pairs)
    parents_PK, seen_PK = gl.maximum(by_rows(above_P, layout, k_PK), 0), k_PK
    for first in range(0, DEPTH + 1, L):
        for level in range(L):
            by_key = gl.sum(gl.reshape(k_PK * seen_PK, [P, X, k_PK.shape[1] // X]), 2)
            by_query = gl.sum(gl.reshape(q_PK * seen_PK, [P, X, k_PK.shape[1] // X]), 2)
            sums_smem.index(level).slice(0, P, 0).store(by_key)
            sums_smem.index(level).slice(P, P, 0).store(by_query)
            seen_PK = gl.gather(seen_PK, parents_PK, 0) * less_PK
        barrier()
        for level in gl.static_range(L):
            sums_RX = sums_smem.index(level).load(_parts_layout(P, X, num_warps))
            sums_R1 = gl.convert_layout(gl.sum(sums_RX, 1), rows)[:, None]
            pairs_RP = gl.where(apart_RP == first + level, sums_R1, pairs_RP)
        if DEPTH >= L:
            barrier()
    return pairs_RP
