"""A state in the registers of a Hopper GPU's warps: its rows, what the pending path adds, and products with it.

A program has some columns of a head's state, which its threads hold in those places in which the tensor cores take their left
operand.  So the state goes from memory to products through no shared memory.  Products are as exact as float32's own: the other
side has 16 bits, and the state is cut into three such parts.

Everything that is read here was written a round ago, so it comes before a kernel's wait, from L2: see path_triton.py, which
reads the same for other GPUs.  This module knows no rule.

Shapes: as of states.py; S: blocks of 16 rows of the state.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma

from specdec.ops.hopper import barrier, copy_to_shared


@gluon.constexpr_function
def states_layout(num_warps, rows=128):
    """Of [S, 16, V] in memory, for so many rows and 16 columns a warp: a thread holds pairs of columns, of just those rows of
    the state that it holds of the tensor cores' operand.

    The operand is [V, K].  Its row 16 w + 8 i + j is column 16 w + 2 j + i of the state: products do not depend on the order of
    their rows, and `by_column` brings it back.
    """
    registers = [[0, 0, 1], [0, 1, 0], [0, 8, 0], *([1 << bit, 0, 0] for bit in range((rows // 16).bit_length() - 1))]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    warps = [[0, 0, 16], [0, 0, 32], [0, 0, 64]][: num_warps.bit_length() - 1]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows // 16, 16, 16 * num_warps])


@gluon.constexpr_function
def shared_states(num_warps):
    """How [S, 16, V] lies in shared memory for `copy_state`: lanes of `states_layout` that read at once meet in no bank."""
    return gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])


@gluon.constexpr_function
def _copies_layout(num_warps):
    across = min(32, 4 * num_warps)  # lanes beside each other, of 4 columns
    return gl.BlockedLayout([1, 1, 4], [1, 32 // across, across], [1, num_warps, 1], [2, 1, 0])


@gluon.jit
def copy_state(state_smem, state, K: gl.constexpr, V: gl.constexpr, num_warps: gl.constexpr):
    """Sends a state on its way into shared memory, while its program does other work without registers for it."""
    layout: gl.constexpr = _copies_layout(num_warps)
    s = gl.arange(0, K // 16, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None][:, :, None]
    k = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :][:, :, None]
    v = gl.arange(0, 16 * num_warps, gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :][None, :, :]
    copy_to_shared(state_smem, state + k * V + v + s * (16 * V))
    async_copy.commit_group()


@gluon.constexpr_function
def _width(layout):
    return layout.shape[-1]


@gluon.jit
def places(rows: gl.constexpr, layout: gl.constexpr):
    """(blocks of 16 rows [S, 1, 1], rows of a block [1, 16, 1], columns [1, 1, V])."""
    s = gl.arange(0, rows // 16, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None][:, :, None]
    k = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :][:, :, None]
    return s, k, gl.arange(0, _width(layout), gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :][None, :, :]


@gluon.jit
def state_pointers(state, K: gl.constexpr, V: gl.constexpr, layout: gl.constexpr):
    """[S, 16, V], from a program's first column on.  Blocks' distances come last, which the compiler puts into the loads."""
    s, k, v = places(K, layout)
    return state + k * V + v + s * (16 * V)


@gluon.jit
def path_nodes(path, E: gl.constexpr, GROUP: gl.constexpr):
    """The first GROUP nodes of a row's pending path, whether or not they were accepted.  No load waits for how many were."""
    nodes = ()
    for e in gl.static_range(GROUP):
        nodes = nodes + (gl.load(path + min(e, E - 1), cache_modifier=".cg"),)  # type: ignore[assignment]
    return nodes


@gluon.jit
def end_of_path(path, nodes, accepted, E: gl.constexpr, GROUP: gl.constexpr):
    """The last accepted node, or any if none was."""
    end = nodes[0]
    for e in gl.static_range(1, GROUP):
        end = gl.where(accepted > e, nodes[e], end)
    if E > GROUP:
        later = gl.load(path + accepted - 1, mask=accepted > GROUP, other=0, cache_modifier=".cg")
        end = gl.where(accepted > GROUP, later, end)
    return end


@gluon.jit
def read_path(
    k_left, u_left, decay_left, path, nodes, accepted, E: gl.constexpr, G: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """(the log-decay at the path's end, what the first GROUP nodes of it add).  Arguments: as of `with_path`."""
    end = end_of_path(path, nodes, accepted, E, GROUP)
    last = gl.load(decay_left + end * H, mask=accepted > 0, other=0.0, cache_modifier=".cg")
    return last, _read_path(k_left, u_left, decay_left, nodes, accepted, G, H, K, V, GROUP, layout, num_warps)


@gluon.jit
def with_path(
    raw_SKV, read, k_left, u_left, decay_left, path, accepted, E: gl.constexpr, G: gl.constexpr, H: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The state with what the pending path adds.  The pointers: at their number, head and first column.  nodes: `path_nodes`.

    read: what `read_path` gave, whose loads are on their way before the state is needed.
    """
    smem = gl.allocate_shared_memory(gl.float32, [GROUP, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    last, left = read
    state_SKV = _add_path(raw_SKV * gl.exp(last), left, last, smem, K, GROUP, layout)
    if E > GROUP:
        for first in range(GROUP, accepted, GROUP):
            later = _later_nodes(path, first, accepted, GROUP)
            left = _read_path(k_left, u_left, decay_left, later, accepted - first, G, H, K, V, GROUP, layout, num_warps)
            barrier()
            state_SKV = _add_path(state_SKV, left, last, smem, K, GROUP, layout)
    return state_SKV


@gluon.jit
def _later_nodes(path, first, accepted, GROUP: gl.constexpr):
    nodes = ()
    for e in gl.static_range(GROUP):
        nodes = nodes + (gl.load(path + first + e, mask=first + e < accepted, other=0, cache_modifier=".cg"),)  # type: ignore[assignment]
    return nodes


@gluon.jit
def _read_path(
    k_left, u_left, decay_left, nodes, accepted, G: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    GROUP: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """(log-decays, u [V], keys [GROUP, K]) of these nodes; zeros of those that were not accepted."""
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    e_E, k_K = gl.arange(0, GROUP, gl.SliceLayout(1, rows)), gl.arange(0, K, gl.SliceLayout(0, rows))
    v_V = gl.arange(0, _width(layout), gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    node_E, decays, added = one_of(nodes, e_E), (), ()
    from_EK = k_left + (node_E * (G * K))[:, None] + k_K[None, :]
    key_EK = gl.load(from_EK, mask=(e_E < accepted)[:, None], other=0.0, cache_modifier=".cg")
    for e in gl.static_range(GROUP):
        decay = gl.load(decay_left + nodes[e] * H, mask=e < accepted, other=float("inf"), cache_modifier=".cg")
        u_V = gl.load(u_left + nodes[e] * (H * V) + v_V, mask=(v_V >= 0) & (e < accepted), other=0.0, cache_modifier=".cg")
        decays, added = decays + (decay,), added + (u_V,)  # type: ignore[assignment]
    return decays, added, key_EK


@gluon.jit
def one_of(nodes, e_E):
    """[E]: of a tuple those of these numbers."""
    node_E = e_E.to(nodes[0].dtype) * 0 + nodes[0]
    for e in gl.static_range(1, len(nodes)):
        node_E = gl.where(e_E == e, nodes[e], node_E)
    return node_E


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
def halves(state_SKV):
    """The first and the last rows of a state."""
    S: gl.constexpr = state_SKV.shape[0]
    parts = gl.reshape(state_SKV, [2, S // 2, state_SKV.shape[1], state_SKV.shape[2]])
    return gl.split(gl.permute(parts, (1, 2, 3, 0)))


@gluon.jit
def pieces_of(state_SKV, COUNT: gl.constexpr):
    """A state's rows, whole or in two halves."""
    if COUNT == 1:
        pieces = (state_SKV,)
    else:
        pieces = halves(state_SKV)
    return pieces


@gluon.jit
def cut(state_SKV, products_layout: gl.constexpr, num_warps: gl.constexpr):
    """Three parts of 16 bits whose sum is the state, each as the tensor cores' left operand [V, K]: see `states_layout`."""
    whole_VK = as_operand(state_SKV, products_layout, num_warps)
    first_VK = high_bits(whole_VK)
    rest_VK = whole_VK - first_VK
    second_VK = high_bits(rest_VK)
    return first_VK.to(gl.bfloat16), second_VK.to(gl.bfloat16), (rest_VK - second_VK).to(gl.bfloat16)


@gluon.jit
def as_operand(x_SKV, products_layout: gl.constexpr, num_warps: gl.constexpr):
    """The tensor cores' left operand [V, K] of what lies as `states_layout` has it, by which no thread gives anything away."""
    K: gl.constexpr = 16 * x_SKV.shape[0]
    ordered = gl.permute(gl.reshape(x_SKV, [K, num_warps, 8, 2]), (1, 3, 2, 0))
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout, 2)
    return gl.convert_layout(gl.reshape(ordered, [16 * num_warps, K]), left, assert_trivial=True)


@gluon.jit
def high_bits(x):
    """Those that bfloat16 has.  Three times as many are all that float32 has."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def multiplied(parts, right_KR, products_VR, IS_FIRST: gl.constexpr):
    """products plus those of a state's rows, at which the tensor cores may still be at work.  IS_FIRST: products are zeros."""
    products_VR = warpgroup_mma(parts[0], right_KR, products_VR, use_acc=not IS_FIRST, is_async=True)
    products_VR = warpgroup_mma(parts[1], right_KR, products_VR, is_async=True)
    return warpgroup_mma(parts[2], right_KR, products_VR, is_async=True)


@gluon.jit
def by_column(products_VR, P: gl.constexpr, num_warps: gl.constexpr, layout: gl.constexpr):
    """[P, 2, V]: products with 2 P vectors, with columns in the state's own order."""
    parts = gl.permute(gl.reshape(products_VR, [num_warps, 2, 8, 2, P]), (4, 3, 0, 2, 1))
    return gl.convert_layout(gl.reshape(parts, [P, 2, 16 * num_warps]), layout)
