"""Kimi's delta rule over trees in one launch, written in Gluon for Hopper GPUs: nodes_triton.py and rule_triton.py at once.

It goes as in trees/rule_hopper.py, whose file says how u and outputs are found by substitution: a program computes some columns
of a head's values for a whole tree, and what nodes have to do with each other (nodes_hopper.py) again for itself.  The tensor
cores multiply the state with keys and queries that are faded already, each channel by itself, so that neither side has 16 bits:
both go into products as two halves whose sum has 17, and the product of the two lower halves is left out.  All other sums and
products are float32's own.

The first half comes before the wait, as in rule_triton.py: the state and what nodes left are a round old (path_hopper.py).  Or
the state is read last of all (LATE), so that few registers do, and an SM has two programs, one of which waits for memory.

Shapes: as of kimi_delta.py; P: nodes that there is room for; W: 2, keys and queries; R: 2 P, keys, then queries.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait
from specdec.ops.launch import chained
from specdec.ops.recurrent.kimi.columns_hopper import substituted_by_blocks
from specdec.ops.recurrent.kimi.launch import KimiHopperTiles
from specdec.ops.recurrent.kimi.nodes_hopper import (
    along_paths,
    by_rows,
    channels_along_paths,
    load_channels,
    pairs_layout,
    parts_of,
    store_channels,
    store_halves,
    walked,
    walks_layout,
)
from specdec.ops.recurrent.kimi.path_hopper import (
    cut_in_halves,
    multiplied_halves,
    read_kimi_path,
    store_kimi_path,
    with_kimi_path,
)
from specdec.ops.recurrent.kimi_delta import KimiGates
from specdec.ops.recurrent.shared_triton import EPS, log_decays, strengths
from specdec.ops.recurrent.states import RuleStates, TreeSteps
from specdec.ops.recurrent.trees.nodes_hopper import ancestors, coefficients, nodes_above, nodes_layout, squares
from specdec.ops.recurrent.trees.state_hopper import (
    copy_state,
    path_nodes,
    shared_states,
    state_pointers,
    states_layout,
)

GROUP, LEVELS = 4, 8  # accepted nodes of the pending path that are read at once; ancestors that are looked at at once


@gluon.jit
def kimi_rule_hopper_kernel(
    y, a, b,  # [B * N, 2 H K + H V], [B * N, H K], [B * N, H]
    A_log, dt_bias,  # [H], [H K]
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., H, K], [L, .., H, V], [L, .., H, K]
    read, write, count,  # [B]
    parents,  # [B, N]
    path,  # [B, E]
    out,  # [B * N, H, V]
    stride_y, stride_a, stride_b, stride_state, stride_k, stride_u, stride_decay,
    N: gl.constexpr, E: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STEPS: gl.constexpr,
    DEPTH: gl.constexpr, CHAIN: gl.constexpr, P: gl.constexpr, GROUP: gl.constexpr, LEVELS: gl.constexpr,
    LATE: gl.constexpr, COPIED: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    BLOCK_V: gl.constexpr = 16 * num_warps
    BLOCKS: gl.constexpr = V // BLOCK_V
    row, h, first_v = gl.program_id(1).to(gl.int64), gl.program_id(0) // BLOCKS, gl.program_id(0) % BLOCKS * BLOCK_V
    states: gl.constexpr = states_layout(num_warps)
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 2 * P, 16])
    number, accepted = gl.load(read + row, cache_modifier=".cg"), gl.load(count + row, cache_modifier=".cg")
    path, above_P = path + row * E, nodes_above(parents + row * N, N, CHAIN, P, num_warps)
    accepted_nodes = path_nodes(path, E, GROUP)
    to_state_SKV = state_pointers(state + h * K * V + first_v, K, V, states)
    from_state_SKV, from_k = to_state_SKV + number * stride_state, k_left + number * stride_k + h * K
    from_u, from_decay = u_left + number * stride_u + h * V + first_v, decay_left + number * stride_decay + h * K
    left = read_kimi_path(from_k, from_u, from_decay, path, accepted_nodes, accepted, E, H, K, V, GROUP, num_warps)
    if COPIED:
        state_smem = gl.allocate_shared_memory(gl.float32, [K // 16, 16, BLOCK_V], shared_states(num_warps))
        copy_state(state_smem, state + h * K * V + first_v + number * stride_state, K, V, num_warps)
    if not LATE:
        raw_SKV = gl.load(from_state_SKV, cache_modifier=".cg")
        stored = store_kimi_path(left, GROUP, K, num_warps)
        barrier()
        state_SKV = with_kimi_path(
            raw_SKV, stored, left[0], from_k, from_u, from_decay, path, accepted, E, H, K, V, GROUP, states, num_warps
        )  # fmt: skip
    bits_P, above = ancestors(above_P, STEPS, P, num_warps)
    depth_P = along_paths(bits_P.to(gl.int32) * 0 + 1, above)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    walks: gl.constexpr = walks_layout(P, num_warps)
    rate, bias_K = gl.load(A_log + h), gl.load(dt_bias + h * K + gl.arange(0, K, gl.SliceLayout(0, rows)))

    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number, y = gl.load(write + row), y + row * N * stride_y
    nodes: gl.constexpr = nodes_layout(P, num_warps)
    n_P = gl.arange(0, P, nodes)
    a_PK = load_channels(a + row * N * stride_a + h * K, stride_a, N, K, P, rows)
    k_PK = load_channels(y + H * K + h * K, stride_y, N, K, P, rows)
    q_PK = load_channels(y + h * K, stride_y, N, K, P, rows)
    b_P = gl.load(b + row * N * stride_b + h + n_P * stride_b, mask=n_P < N, other=0.0)
    values: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_V, BLOCK_V // 8], [num_warps, 1], [1, 0])
    from_v = y + 2 * H * K + h * V + first_v
    if not COPIED:
        v_PV = load_channels(from_v, stride_y, N, BLOCK_V, P, values)
    to_state_SKV += number * stride_state
    if LATE:
        stored = store_kimi_path(left, GROUP, K, num_warps)
    else:
        gl.store(to_state_SKV, state_SKV)
        parts = cut_in_halves(state_SKV, of_state, num_warps)

    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    squares_smem = gl.allocate_shared_memory(gl.float32, [2 * P], flat)
    if not COPIED:
        v_smem = gl.allocate_shared_memory(gl.bfloat16, [P, BLOCK_V], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        v_smem.store(v_PV)
    decay_PK = log_decays(a_PK, rate, bias_K[None, :])
    unsound_P = gl.sum(decay_PK - decay_PK, 1)  # 0, or NaN of what is not finite
    squares_smem.slice(0, P).store(squares(k_PK) + unsound_P)
    squares_smem.slice(P, P).store(squares(q_PK))
    barrier()
    k_squares, q_squares = squares_smem.slice(0, P).load(nodes), squares_smem.slice(P, P).load(nodes)
    beta_P = strengths(b_P)
    # Numbers of a node that are not finite may reach those below it alone: `rule.without_broken`.
    sound_P = (q_squares < float("inf")) & (k_squares < float("inf")) & (beta_P == beta_P) & (n_P < N)
    q_length = gl.where(sound_P, gl.rsqrt(q_squares + EPS) * K**-0.5, 0.0)
    k_length = gl.where(sound_P, gl.rsqrt(k_squares + EPS), 0.0)
    beta_P = gl.where(sound_P, beta_P, 0.0)
    length_P1 = gl.rsqrt(squares(k_PK) + EPS)[:, None]
    to_k, to_decay = k_left + number * stride_k + h * K, decay_left + number * stride_decay + h * K
    store_channels(k_PK.to(gl.float32) * length_P1, to_k, H * K, N, BLOCKS, rows)

    # From here on a lane holds a node.
    sound_PK = by_rows(sound_P.to(gl.int32), walks, gl.zeros([P, K], gl.float32, walks)) != 0
    decay_PK = gl.where(sound_PK, gl.convert_layout(decay_PK, walks), 0.0)
    q_PK = gl.where(sound_PK, gl.convert_layout(q_PK, walks).to(gl.float32), 0.0)
    k_PK = gl.where(sound_PK, gl.convert_layout(k_PK, walks).to(gl.float32), 0.0)
    summed_PK = channels_along_paths(decay_PK, above, walks)
    store_channels(gl.convert_layout(summed_PK, rows), to_decay, H * K, N, BLOCKS, rows)
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    high_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * P, K], tiled)
    low_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * P, K], tiled)
    faded_PK = gl.exp(summed_PK)
    store_halves(k_PK * faded_PK, high_smem, low_smem, 0)
    store_halves(q_PK * faded_PK, high_smem, low_smem, P)
    fence_async_shared()
    barrier()
    products_VR = gl.zeros([BLOCK_V, 2 * P], gl.float32, of_state)
    if not LATE:
        products_VR = multiplied_halves(parts, high_smem, low_smem, products_VR)
    pairs_RP = walked(  # while the tensor cores work
        q_PK, k_PK, gl.exp(decay_PK), above[0], depth_P, bits_P, DEPTH, P, parts_of(P, num_warps), min(LEVELS, DEPTH + 1),
        walks, num_warps,
    )  # fmt: skip
    scale_smem = gl.allocate_shared_memory(gl.float32, [2 * P], flat)
    length_smem = gl.allocate_shared_memory(gl.float32, [P], flat)
    factor_smem = gl.allocate_shared_memory(gl.float32, [2 * P], flat)
    beta_smem = gl.allocate_shared_memory(gl.float32, [P], flat)
    scale_smem.slice(0, P).store(-beta_P * k_length)
    scale_smem.slice(P, P).store(q_length)
    length_smem.store(k_length)
    factor_smem.slice(0, P).store(-k_length)
    factor_smem.slice(P, P).store(gl.where(sound_P, q_length, float("nan")))
    beta_smem.store(beta_P)
    barrier()
    pairs: gl.constexpr = pairs_layout(P, num_warps)
    scale_R, length_P = scale_smem.load(gl.SliceLayout(1, pairs)), length_smem.load(gl.SliceLayout(0, pairs))
    lower = coefficients(pairs_RP * scale_R[:, None] * length_P[None, :], P, 2 * P)
    if LATE:
        if COPIED:
            async_copy.wait_group(0)
            barrier()
            raw_SKV = state_smem.load(states)
        else:
            raw_SKV = gl.load(from_state_SKV, cache_modifier=".cg")
        state_SKV = with_kimi_path(
            raw_SKV, stored, left[0], from_k, from_u, from_decay, path, accepted, E, H, K, V, GROUP, states, num_warps
        )  # fmt: skip
        gl.store(to_state_SKV, state_SKV)
        parts = cut_in_halves(state_SKV, of_state, num_warps)
        products_VR = multiplied_halves(parts, high_smem, low_smem, products_VR)
    if COPIED:
        v_PV = load_channels(from_v, stride_y, N, BLOCK_V, P, values)  # late, for want of shared memory
    products_VR, _, _, _, _ = warpgroup_mma_wait(0, deps=(products_VR, parts[0], parts[1], high_smem, low_smem))
    barrier()  # what follows may lie where other warps' products still read keys and queries
    if COPIED:
        v_smem = gl.allocate_shared_memory(gl.bfloat16, [P, BLOCK_V], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        v_smem.store(v_PV)

    products_VR *= factor_smem.load(gl.SliceLayout(0, of_state))[None, :]
    to_u, to_out = u_left + number * stride_u + h * V + first_v, out + row * N * H * V + h * V + first_v
    substituted_by_blocks(products_VR, v_smem, beta_smem, lower, to_u, to_out, N, H * V, P, num_warps)


def launch_kimi_trees_hopper(
    y_TC: Tensor, gates: KimiGates, layer: RuleStates, steps: TreeSteps, out_THV: Tensor, tiles: KimiHopperTiles
) -> None:
    """`kimi_delta.tree_outputs`, into out_THV.  launch.py has checked what its own kernels take, too."""
    (B, N), E = steps.parents_BN.shape, steps.path_BE.shape[1]
    _, H, K, V = layer.state_PHKV.shape
    memory = layer.state_PHKV, layer.k_LNGK, layer.u_LNHV, layer.decay_LNH
    limit = {"maxnreg": tiles.registers} if tiles.registers else {}
    kimi_rule_hopper_kernel[(H * (V // (16 * tiles.warps)), B)](
        y_TC, *gates, *memory, steps.read_B, steps.write_B, steps.count_B, steps.parents_BN, steps.path_BE, out_THV,
        y_TC.stride(0), gates.a_TC.stride(0), gates.b_TH.stride(0), *(each.stride(0) for each in memory), N=N, E=E, H=H, K=K,
        V=V, STEPS=steps.max_depth.bit_length(), DEPTH=steps.max_depth, CHAIN=steps.is_chain,
        P=max(16, triton.next_power_of_2(N)), GROUP=min(GROUP, triton.next_power_of_2(E)), LEVELS=LEVELS,
        LATE=tiles.late, COPIED=tiles.copied, num_warps=tiles.warps, **limit, **chained(y_TC.device),
    )  # fmt: skip
