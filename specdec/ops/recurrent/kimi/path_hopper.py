"""The pending path in Kimi's rule on Hopper GPUs: as trees/state_hopper.py adds it, but that each channel fades by itself.

It also cuts a state into halves of 16 bits for the tensor cores: rule_hopper.py says why two do.

Shapes: as of trees/state_hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from specdec.ops.hopper import barrier
from specdec.ops.recurrent.chunks.prepare_triton import halves
from specdec.ops.recurrent.trees.state_hopper import end_of_path, one_of


@gluon.jit
def read_kimi_path(
    k_left, u_left, decay_left, path, nodes, accepted, E: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    GROUP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """(log-decays at the path's end [K]; of its first GROUP nodes: see `_read_path`).  The pointers: as of `with_kimi_path`."""
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    k_K, end = gl.arange(0, K, gl.SliceLayout(0, rows)), end_of_path(path, nodes, accepted, E, GROUP)
    last_K = gl.load(decay_left + end * (H * K) + k_K, mask=(k_K >= 0) & (accepted > 0), other=0.0, cache_modifier=".cg")
    node_E = one_of(nodes, gl.arange(0, GROUP, gl.SliceLayout(1, rows)))
    return last_K, _read_path(k_left, u_left, decay_left, node_E, accepted, H, K, V, GROUP, 16 * num_warps, rows)


@gluon.jit
def store_kimi_path(left, GROUP: gl.constexpr, K: gl.constexpr, num_warps: gl.constexpr):
    """What `read_kimi_path` gave, in shared memory, until `with_kimi_path` needs it: (faded keys, u, how far channels fade)."""
    last_K, nodes = left
    smem = gl.allocate_shared_memory(gl.float32, [GROUP, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    u_smem = gl.allocate_shared_memory(gl.float32, [GROUP, 16 * num_warps], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    fading_smem = gl.allocate_shared_memory(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fading_smem.store(gl.exp(last_K))
    smem.store(_faded_keys(nodes, last_K))
    u_smem.store(nodes[0])
    return smem, u_smem, fading_smem


@gluon.jit
def with_kimi_path(
    raw_SKV, stored, last_K, k_left, u_left, decay_left, path, accepted, E: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The state with what the pending path adds.  stored: by `store_kimi_path`, since which all threads have met.

    The pointers: at their number, head and first column.
    """
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    smem, u_smem, fading_smem = stored
    fading = fading_smem._reinterpret(gl.float32, [K // 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    state_SKV = raw_SKV * fading.load(gl.SliceLayout(2, layout))[:, :, None]
    state_SKV = _add_path(state_SKV, smem, u_smem, gl.minimum(accepted, GROUP), K, GROUP, 16 * num_warps, layout)
    if E > GROUP:
        for first in range(GROUP, accepted, GROUP):
            more, e_E = accepted - first, gl.arange(0, GROUP, gl.SliceLayout(1, rows))
            node_E = gl.load(path + first + e_E, mask=e_E < more, other=0, cache_modifier=".cg")
            left = _read_path(k_left, u_left, decay_left, node_E, more, H, K, V, GROUP, 16 * num_warps, rows)
            barrier()
            smem.store(_faded_keys(left, last_K))
            u_smem.store(left[0])
            barrier()
            state_SKV = _add_path(state_SKV, smem, u_smem, gl.minimum(more, GROUP), K, GROUP, 16 * num_warps, layout)
    return state_SKV


@gluon.jit
def _read_path(
    k_left, u_left, decay_left, node_E, accepted, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_V: gl.constexpr, rows: gl.constexpr,
):  # fmt: skip
    """(u [GROUP, V], keys and log-decays [GROUP, K]) of these nodes.

    Zeros, and infinite decays, of those that were not accepted.
    """
    e_E, k_K = gl.arange(0, GROUP, gl.SliceLayout(1, rows)), gl.arange(0, K, gl.SliceLayout(0, rows))
    v_V = gl.arange(0, BLOCK_V, gl.SliceLayout(0, rows))
    at_EK, ok_E1 = (node_E * (H * K))[:, None] + k_K[None, :], (e_E < accepted)[:, None]
    key_EK = gl.load(k_left + at_EK, mask=ok_E1, other=0.0, cache_modifier=".cg")
    decay_EK = gl.load(decay_left + at_EK, mask=ok_E1, other=float("inf"), cache_modifier=".cg")
    from_u_EV = u_left + (node_E * (H * V))[:, None] + v_V[None, :]
    u_EV = gl.load(from_u_EV, mask=ok_E1, other=0.0, cache_modifier=".cg")
    return u_EV, key_EK, decay_EK


@gluon.jit
def _faded_keys(left, last_K):
    """Keys of those nodes, as faded as the end of the path sees them."""
    _, key_EK, decay_EK = left
    return key_EK * gl.exp(last_K[None, :] - decay_EK)


@gluon.jit
def _add_path(
    state_SKV, smem, u_smem, count, K: gl.constexpr, GROUP: gl.constexpr, BLOCK_V: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The state with what so many of those nodes add."""
    keys = smem._reinterpret(gl.float32, [GROUP, K // 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    u = u_smem._reinterpret(gl.float32, [GROUP, BLOCK_V], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for e in range(count):
        key_SK = keys.index(e).load(gl.SliceLayout(2, layout))
        u_V = u.index(e).load(gl.SliceLayout(0, gl.SliceLayout(0, layout)))
        state_SKV += key_SK[:, :, None] * u_V[None, :][None, :, :]
    return state_SKV


@gluon.jit
def cut_in_halves(state_SKV, products_layout: gl.constexpr, num_warps: gl.constexpr):
    """Two parts of 16 bits, each as the tensor cores' left operand [V, K]: see `state_hopper.states_layout`."""
    K: gl.constexpr = 16 * state_SKV.shape[0]
    ordered = gl.permute(gl.reshape(state_SKV, [K, num_warps, 8, 2]), (1, 3, 2, 0))
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout, 2)
    return halves(gl.convert_layout(gl.reshape(ordered, [16 * num_warps, K]), left, assert_trivial=True))


@gluon.jit
def multiplied_halves(parts, high_smem, low_smem, products_VR):
    """Products with rows in two halves, at which the tensor cores may still be at work.  products_VR: zeros."""
    high_KR, low_KR = high_smem.permute((1, 0)), low_smem.permute((1, 0))
    products_VR = warpgroup_mma(parts[1], high_KR, products_VR, use_acc=False, is_async=True)
    products_VR = warpgroup_mma(parts[0], low_KR, products_VR, is_async=True)
    return warpgroup_mma(parts[0], high_KR, products_VR, is_async=True)
