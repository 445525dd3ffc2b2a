"""The gated delta rule over trees in one launch, written in Gluon for Hopper GPUs: nodes_triton.py and rule_triton.py at once.

A program computes some columns of a head's values for a whole tree.  What nodes have to do with each other is cheap enough here
for each of a head's programs to compute it again, because no matrix is inverted.  With C = -beta (k k') fade below the diagonal
and A = (q k') fade on it and below,

    u_i = right_i + sum over j < i of C_ij u_j        out_i = f_i (q_i S) + sum over j <= i of A_ij u_j

are two sums over the same u.  A lane holds one column of one of the two, all nodes of it, in its registers.  Step j reads u_j,
which is complete by then, from the lane that holds it, and adds it, times column j of C or A, to all later nodes.  These are
float32's own products and sums, and no warp waits for another one.

The first half comes before the wait, as in rule_triton.py: the state and what nodes left are a round old (state_hopper.py).

Shapes: as of gated_delta.py; P: nodes that there is room for; W: 2, what a lane holds (0: u, made of keys; 1: outputs, of
queries); R: rows of keys, then of queries, 64 at least.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait
from specdec.ops.launch import chained
from specdec.ops.recurrent.gated_delta import Gates
from specdec.ops.recurrent.shared_triton import EPS, log_decays, strengths
from specdec.ops.recurrent.states import RuleStates, TreeSteps
from specdec.ops.recurrent.trees.columns_hopper import columns_layout, right_sides, store_columns, substituted
from specdec.ops.recurrent.trees.hopper_tiles import HopperTiles
from specdec.ops.recurrent.trees.nodes_hopper import (
    ancestors,
    coefficients,
    facts,
    load_keys_and_queries,
    nodes_above,
    nodes_layout,
    squares,
    store_keys,
)
from specdec.ops.recurrent.trees.state_hopper import (
    by_column,
    copy_state,
    cut,
    multiplied,
    path_nodes,
    pieces_of,
    read_path,
    shared_states,
    state_pointers,
    states_layout,
    with_path,
)

GROUP = 4  # accepted nodes of the pending path that are read at once


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
    CHAIN: gl.constexpr, P: gl.constexpr, GROUP: gl.constexpr, SLICES: gl.constexpr, TURNS: gl.constexpr, MOST: gl.constexpr,
    COPIED: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    BLOCK_V: gl.constexpr = 16 * num_warps
    BLOCKS: gl.constexpr = V // BLOCK_V
    R: gl.constexpr = max(64, 2 * P)
    row, h, first_v = gl.program_id(1).to(gl.int64), gl.program_id(0) // BLOCKS, gl.program_id(0) % BLOCKS * BLOCK_V
    g = h // (H // G)
    states: gl.constexpr = states_layout(num_warps)
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 2 * P, 16])
    number, accepted = gl.load(read + row, cache_modifier=".cg"), gl.load(count + row, cache_modifier=".cg")
    path, above_P = path + row * E, nodes_above(parents + row * N, N, CHAIN, P, num_warps)
    accepted_nodes, rate, bias = path_nodes(path, E, GROUP), gl.load(A_log + h), gl.load(dt_bias + h)
    to_state_SKV = state_pointers(state + h * K * V + first_v, K, V, states)
    if COPIED:
        state_smem = gl.allocate_shared_memory(gl.float32, [K // 16, 16, BLOCK_V], shared_states(num_warps))
        copy_state(state_smem, state + h * K * V + first_v + number * stride_state, K, V, num_warps)
    else:
        raw_SKV = gl.load(to_state_SKV + number * stride_state, cache_modifier=".cg")
    from_k, from_u = k_left + number * stride_k + g * K, u_left + number * stride_u + h * V + first_v
    from_decay = decay_left + number * stride_decay + h
    on_path = read_path(
        from_k, from_u, from_decay, path, accepted_nodes, accepted, E, G, H, K, V, GROUP, states, num_warps
    )  # fmt: skip
    if not COPIED:
        state_SKV = with_path(
            raw_SKV, on_path, from_k, from_u, from_decay, path, accepted, E, G, H, K, V, GROUP, states, num_warps
        )
    bits_P, above = ancestors(above_P, STEPS, P, num_warps)
    if SLICES == 0:
        parts = cut(state_SKV, of_state, num_warps)

    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number, y = gl.load(write + row), y + row * N * stride_y
    nodes: gl.constexpr = nodes_layout(P, num_warps)
    n_P = gl.arange(0, P, nodes)
    a_P = gl.load(a + row * N * stride_a + h + n_P * stride_a, mask=n_P < N, other=0.0)
    b_P = gl.load(b + row * N * stride_b + h + n_P * stride_b, mask=n_P < N, other=0.0)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    values: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_V, BLOCK_V // 8], [num_warps, 1], [1, 0])
    kq_RK = load_keys_and_queries(y + g * K, stride_y, N, G, K, P, R, rows)
    n_N, v_V = gl.arange(0, P, gl.SliceLayout(1, values)), gl.arange(0, BLOCK_V, gl.SliceLayout(0, values))
    from_v_PV = y + 2 * G * K + h * V + first_v + n_N[:, None] * stride_y + v_V[None, :]
    v_PV = gl.load(from_v_PV, mask=(n_N < N)[:, None], other=0.0)
    if not COPIED:
        gl.store(to_state_SKV + number * stride_state, state_SKV)

    kq_smem = gl.allocate_shared_memory(gl.bfloat16, [R, K], gl.NVMMASharedLayout(128, 16, 2))
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [P, BLOCK_V], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    squares_smem = gl.allocate_shared_memory(gl.float32, [R], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kq_smem.store(kq_RK)
    v_smem.store(v_PV)
    squares_smem.store(squares(kq_RK))
    fence_async_shared()
    barrier()
    between: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, P // (num_warps // 4), 16])
    keys_KP, kq_KR = kq_smem.slice(0, P, 0).permute((1, 0)), kq_smem.slice(0, 2 * P, 0).permute((1, 0))
    similar_RP = warpgroup_mma(kq_smem, keys_KP, gl.zeros([R, P], gl.float32, between), use_acc=False, is_async=True)
    products_VR = gl.zeros([BLOCK_V, 2 * P], gl.float32, of_state)
    if not COPIED:
        if SLICES > 0:
            pieces = pieces_of(state_SKV, SLICES)
            parts = cut(pieces[0], of_state, num_warps)
            products_VR = multiplied(parts, kq_KR.slice(0, K // SLICES), products_VR, True)
        else:
            products_VR = multiplied(parts, kq_KR, products_VR, True)

    # While the tensor cores work.
    to_k = k_left + number * stride_k + g * K
    store_keys(y + G * K + g * K, to_k, stride_y, N, G, K, H // G * BLOCKS, True, rows, num_warps)
    k_squares, q_squares = squares_smem.slice(0, P).load(nodes), squares_smem.slice(P, P).load(nodes)
    decay_P, beta_P = log_decays(a_P, rate, bias), strengths(b_P, MOST)
    # Numbers of a node that are not finite may reach those below it alone: `gated_delta.without_broken`.
    sound_P = (q_squares < float("inf")) & (k_squares < float("inf")) & (gl.abs(decay_P) < float("inf")) & (beta_P == beta_P)
    summed_P = gl.where(sound_P, decay_P, 0.0)
    for step in gl.static_range(len(above)):
        more_P = gl.gather(summed_P, gl.maximum(above[step], 0), 0)
        summed_P += gl.where(above[step] >= 0, more_P, 0.0)
    gl.store(decay_left + number * stride_decay + h + n_P * H, summed_P, mask=(n_P < N) & (first_v == 0))
    q_length = gl.where(sound_P, gl.rsqrt(q_squares + EPS) * K**-0.5, 0.0)
    k_length = gl.where(sound_P, gl.rsqrt(k_squares + EPS), 0.0)
    beta_P = gl.where(sound_P, beta_P, 0.0)
    scales, fade_RP, factor_smem, beta_smem = facts(sound_P, summed_P, beta_P, q_length, k_length, bits_P, P, R, between)
    similar_RP = warpgroup_mma_wait(0 if COPIED else 3, deps=(similar_RP,))
    similar_RP = gl.where(fade_RP != 0, similar_RP * scales[0][:, None] * scales[1][None, :] * fade_RP, 0.0)
    lower = coefficients(similar_RP, P, R)
    if COPIED:
        async_copy.wait_group(0)
        barrier()
        raw_SKV = state_smem.load(states)
        state_SKV = with_path(
            raw_SKV, on_path, from_k, from_u, from_decay, path, accepted, E, G, H, K, V, GROUP, states, num_warps
        )
        gl.store(to_state_SKV + number * stride_state, state_SKV)
        pieces = pieces_of(state_SKV, SLICES)
        parts = cut(pieces[0], of_state, num_warps)
        products_VR = multiplied(parts, kq_KR.slice(0, K // SLICES), products_VR, True)
    products_VR, _, _, _, _ = warpgroup_mma_wait(0, deps=(products_VR, parts[0], parts[1], parts[2], kq_smem))
    if SLICES == 2:
        parts = cut(pieces[1], of_state, num_warps)
        products_VR = multiplied(parts, kq_KR.slice(K // 2, K // 2), products_VR, False)
        products_VR, _, _, _, _ = warpgroup_mma_wait(0, deps=(products_VR, parts[0], parts[1], parts[2], kq_smem))
    barrier()  # what follows may lie where other warps' products still read keys and queries

    columns: gl.constexpr = columns_layout(P, num_warps)
    x_PWV = right_sides(by_column(products_VR, P, num_warps, columns), v_smem, factor_smem, beta_smem, P, num_warps, columns)
    x_PWV = substituted(x_PWV, lower, P, TURNS, num_warps, columns)
    to_u, to_out = u_left + number * stride_u + h * V + first_v, out + row * N * H * V + h * V + first_v
    store_columns(x_PWV, to_u, to_out, N, H * V, columns)


def launch_tree_rule_hopper(
    y_TC: Tensor, gates: Gates, layer: RuleStates, steps: TreeSteps, out_THV: Tensor, tiles: HopperTiles
) -> None:
    """`gated_delta.tree_outputs`, into out_THV.  rule_triton.py has checked what its own kernels take, too."""
    (B, N), E = steps.parents_BN.shape, steps.path_BE.shape[1]
    (_, H, K, V), G = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    memory = layer.state_PHKV, layer.k_LNGK, layer.u_LNHV, layer.decay_LNH
    limit = {"maxnreg": tiles.registers} if tiles.registers else {}
    tree_rule_hopper_kernel[(H * (V // (16 * tiles.warps)), B)](
        y_TC, *gates.tensors, *memory, steps.read_B, steps.write_B, steps.count_B, steps.parents_BN, steps.path_BE, out_THV,
        y_TC.stride(0), gates.a_TH.stride(0), gates.b_TH.stride(0), *(each.stride(0) for each in memory), N=N, E=E, G=G, H=H,
        K=K, V=V, STEPS=steps.max_depth.bit_length(), CHAIN=steps.is_chain, P=max(16, triton.next_power_of_2(N)),
        GROUP=min(GROUP, triton.next_power_of_2(E)), SLICES=tiles.slices, TURNS=tiles.turns, MOST=gates.most,
        COPIED=tiles.copied, num_warps=tiles.warps, **limit, **chained(y_TC.device),
    )  # fmt: skip
