"""Mamba-2's rule over trees, written in Gluon for Hopper GPUs: see ssd_tree_triton.py, which does the same elsewhere.

A program computes 64 columns of a head's values for a whole tree:

    out^T = (S^T q^T) exp(D) + x^T A^T + skip x^T        A_ij = (q_i . k_j) exp(D_i - D_j) dt_j on node i's path

Three products of the tensor cores.  Of both that give outputs the left operand, the state and the values, goes from memory into
just those registers in which the tensor cores take it, and an output's thread holds the values of its node: no state, value or
output goes through shared memory.  Only queries, keys and A do.

What are numbers of 32 bits, the state and A, goes in as two of 16, whose sum has 16 bits at least: they go into outputs alone,
which are rounded to 9.  States themselves and what nodes leave are float32's own sums and products.

The first half comes before the wait, as in ssd_tree_triton.py: the state and what nodes left are a round old (state_hopper.py).
Or the state is on its way into shared memory while nodes are worked on, and comes last (COPIED): where there are more programs
than fit on a GPU, of which only the first ones have anything to wait for.

Shapes: as of ssd.py; P: nodes that there is room for; R: 64, rows of queries; S: blocks of 16 rows of the state, or nodes.
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
from specdec.ops.recurrent.mamba.nodes_hopper import (
    by_node,
    copy_nodes,
    diagonal,
    marked,
    multiplied,
    read_values,
    store_reads,
    two_parts,
    without_marks,
)
from specdec.ops.recurrent.mamba.ssd_hopper_tiles import SsdHopperTiles
from specdec.ops.recurrent.shared_triton import softplus
from specdec.ops.recurrent.ssd import SsdGates
from specdec.ops.recurrent.states import RuleStates, TreeSteps
from specdec.ops.recurrent.trees.nodes_hopper import ancestors, nodes_above, nodes_layout, store_keys
from specdec.ops.recurrent.trees.state_hopper import (
    as_operand,
    copy_state,
    path_nodes,
    places,
    read_path,
    shared_states,
    state_pointers,
    states_layout,
    with_path,
)

GROUP = 4  # accepted nodes of the pending path that are read at once
WARPS = 4  # of 16 columns each


@gluon.jit
def ssd_tree_hopper_kernel(
    y, dt,  # [B * N, 2 G K + H V], [B * N, H]
    A_log, dt_bias, D,  # [H]
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., G, K], [L, .., H, V], [L, .., H]
    read, write, count,  # [B]
    path,  # [B, E]
    parents,  # [B, N]
    out,  # [B * N, H, V]
    stride_y, stride_dt, stride_state, stride_k, stride_u, stride_decay,
    N: gl.constexpr, E: gl.constexpr, G: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STEPS: gl.constexpr,
    CHAIN: gl.constexpr, P: gl.constexpr, GROUP: gl.constexpr, COPIED: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    BLOCK_V: gl.constexpr = 16 * num_warps
    BLOCKS: gl.constexpr = V // BLOCK_V
    row, h, first_v = gl.program_id(1).to(gl.int64), gl.program_id(0) // BLOCKS, gl.program_id(0) % BLOCKS * BLOCK_V
    g, own_v, own_y, own_dt = h // (H // G), h * V + first_v, y + row * N * stride_y, dt + row * N * stride_dt + h
    states: gl.constexpr = states_layout(num_warps)
    values: gl.constexpr = states_layout(num_warps, P)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    nodes: gl.constexpr = nodes_layout(P, num_warps)
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, P, 16])
    between: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, P, 16])
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, K], gl.NVMMASharedLayout(128, 16, 2))
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [P, K], gl.NVMMASharedLayout(128, 16, 2))
    number, accepted = gl.load(read + row, cache_modifier=".cg"), gl.load(count + row, cache_modifier=".cg")
    path, above_P = path + row * E, nodes_above(parents + row * N, N, CHAIN, P, num_warps)
    accepted_nodes = path_nodes(path, E, GROUP)
    rate, bias, skip = gl.load(A_log + h).to(gl.float32), gl.load(dt_bias + h).to(gl.float32), gl.load(D + h).to(gl.float32)
    to_state_SKV = state_pointers(state + h * K * V + first_v, K, V, states)
    from_k, from_u = k_left + number * stride_k + g * K, u_left + number * stride_u + own_v
    from_decay = decay_left + number * stride_decay + h
    if COPIED:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        written = gl.load(write + row)
        inputs = _read_nodes(
            own_y, own_dt, stride_y, stride_dt, g, own_v, q_smem, k_smem, N, G, K, P, rows, values, nodes
        )  # fmt: skip
        state_smem = gl.allocate_shared_memory(gl.float32, [K // 16, 16, BLOCK_V], shared_states(num_warps))
        copy_state(state_smem, state + h * K * V + first_v + number * stride_state, K, V, num_warps)
    else:
        state_SKV = gl.load(to_state_SKV + number * stride_state, cache_modifier=".cg")
    on_path = read_path(
        from_k, from_u, from_decay, path, accepted_nodes, accepted, E, G, H, K, V, GROUP, states, num_warps
    )  # fmt: skip
    if not COPIED:
        state_SKV = with_path(
            state_SKV, on_path, from_k, from_u, from_decay, path, accepted, E, G, H, K, V, GROUP, states, num_warps
        )
    bits_P, above = ancestors(above_P, STEPS, P, num_warps)
    if not COPIED:
        parts = two_parts(state_SKV, of_state, num_warps)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        written = gl.load(write + row)
        inputs = _read_nodes(
            own_y, own_dt, stride_y, stride_dt, g, own_v, q_smem, k_smem, N, G, K, P, rows, values, nodes
        )  # fmt: skip
    x_SPV, dt_P = inputs
    number = written
    if not COPIED:
        gl.store(to_state_SKV + number * stride_state, state_SKV)
    async_copy.wait_group(1 if COPIED else 0)
    fence_async_shared()
    barrier()
    q_KP, keys_KP = q_smem.slice(0, P, 0).permute((1, 0)), k_smem.permute((1, 0))
    similar_RP = warpgroup_mma(q_smem, keys_KP, gl.zeros([64, P], gl.float32, between), use_acc=False, is_async=True)
    products_VP = gl.zeros([BLOCK_V, P], gl.float32, of_state)
    if not COPIED:
        products_VP = multiplied(parts, q_KP, products_VP)

    # While the tensor cores work.
    to_k = k_left + number * stride_k + g * K
    store_keys(own_y + (G + g) * K, to_k, stride_y, N, G, K, H // G * BLOCKS, False, rows, num_warps)
    n_P = gl.arange(0, P, nodes)
    step_P = softplus(dt_P.to(gl.float32) + bias)
    decay_P = gl.exp(rate) * step_P
    similar_RP = warpgroup_mma_wait(0 if COPIED else 2, deps=(similar_RP,))
    # Numbers of a node that are not finite may reach those below it alone: `rule.without_broken`.  Of a query or a key they
    # show in the node's product with itself.
    sound_P = (gl.abs(diagonal(similar_RP, P, nodes)) < float("inf")) & (decay_P < float("inf"))
    step_P, summed_P = gl.where(sound_P, step_P, 0.0), gl.where(sound_P, -decay_P, 0.0)
    for step in gl.static_range(len(above)):
        more_P = gl.gather(summed_P, gl.maximum(above[step], 0), 0)
        summed_P += gl.where(above[step] >= 0, more_P, 0.0)
    gl.store(decay_left + number * stride_decay + h + n_P * H, summed_P, mask=(n_P < N) & (first_v == 0))
    facts = _shared_facts(sound_P, step_P, summed_P, bits_P, P)
    layout_PP: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * P), 16, 2)
    first_smem = gl.allocate_shared_memory(gl.bfloat16, [64, P], layout_PP)
    second_smem = gl.allocate_shared_memory(gl.bfloat16, [64, P], layout_PP)
    store_reads(similar_RP, facts[0], facts[1], facts[3], first_smem, second_smem, P, between)
    s, n, v = places(P, values)
    step_SP = facts[1]._reinterpret(gl.float32, [P // 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    step_SP1 = step_SP.load(gl.SliceLayout(2, values))[:, :, None]
    n = 16 * s + n
    to_nodes, ok_SP1 = n * (H * V) + v, n + v * 0 < N
    marked_SPV, u_SPV = marked(x_SPV, step_SP1)
    gl.store(u_left + number * stride_u + own_v + to_nodes, u_SPV, mask=ok_SP1)
    x_VP = as_operand(without_marks(marked_SPV), of_state, num_warps)
    fence_async_shared()
    barrier()
    if COPIED:
        async_copy.wait_group(0)
        barrier()
        state_SKV = with_path(
            state_smem.load(states),
            on_path,
            from_k,
            from_u,
            from_decay,
            path,
            accepted,
            E,
            G,
            H,
            K,
            V,
            GROUP,
            states,
            num_warps,
        )
        gl.store(to_state_SKV + number * stride_state, state_SKV)
        parts = two_parts(state_SKV, of_state, num_warps)
        products_VP = multiplied(parts, q_KP, products_VP)
    products_VP, _, _, _ = warpgroup_mma_wait(0, deps=(products_VP, parts[0], parts[1], q_smem))
    products_VP *= facts[2].load(gl.SliceLayout(0, of_state))[None, :]
    products_VP = warpgroup_mma(x_VP, first_smem.slice(0, P, 0).permute((1, 0)), products_VP, is_async=True)
    products_VP = warpgroup_mma(x_VP, second_smem.slice(0, P, 0).permute((1, 0)), products_VP, is_async=True)
    products_VP, _, _, _ = warpgroup_mma_wait(0, deps=(products_VP, x_VP, first_smem, second_smem))
    out_SPV = by_node(products_VP, P, num_warps, values) + skip * marked_SPV.to(gl.float32)
    gl.store(out + row * N * H * V + own_v + to_nodes, out_SPV.to(out.dtype.element_ty), mask=ok_SP1)


@gluon.jit
def _read_nodes(
    y, dt, stride_y, stride_dt, g, own_v, q_smem, k_smem, N: gl.constexpr, G: gl.constexpr, K: gl.constexpr, P: gl.constexpr,
    rows: gl.constexpr, values: gl.constexpr, nodes: gl.constexpr,
):  # fmt: skip
    """(x [S, 16, V], dt [P]); queries and keys are on their way into shared memory.  Zeros of nodes that are not there."""
    copy_nodes(y + g * K, stride_y, q_smem, k_smem, N, G, K, P, rows)
    x_SPV, n_P = read_values(y + 2 * G * K + own_v, stride_y, N, P, values), gl.arange(0, P, nodes)
    return x_SPV, gl.load(dt + n_P * stride_dt, mask=n_P < N, other=0.0)


@gluon.jit
def _shared_facts(sound_P, step_P, summed_P, bits_P, P: gl.constexpr):
    """What nodes know of themselves, for all threads: (log-decays, steps, what they read of the state, ancestors)."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    summed_smem = gl.allocate_shared_memory(gl.float32, [64], flat)
    step_smem = gl.allocate_shared_memory(gl.float32, [P], flat)
    faded_smem = gl.allocate_shared_memory(gl.float32, [P], flat)
    bits_smem = gl.allocate_shared_memory(bits_P.dtype, [64], flat)
    summed_smem.slice(0, P).store(summed_P)
    step_smem.store(step_P)
    faded_smem.store(gl.where(sound_P, gl.exp(summed_P), float("nan")))
    bits_smem.slice(0, P).store(bits_P)
    barrier()
    return summed_smem, step_smem, faded_smem, bits_smem


def launch_ssd_tree_hopper(
    y_TC: Tensor, gates: SsdGates, layer: RuleStates, steps: TreeSteps, out_THV: Tensor, tiles: SsdHopperTiles
) -> None:
    """`ssd.tree_outputs`, into out_THV.  ssd_tree_triton.py has checked what its own kernels take, too."""
    (B, N), E = steps.parents_BN.shape, steps.path_BE.shape[1]
    (_, H, K, V), G = layer.state_PHKV.shape, layer.k_LNGK.shape[2]
    memory = layer.state_PHKV, layer.k_LNGK, layer.u_LNHV, layer.decay_LNH
    limit = {"maxnreg": tiles.registers} if tiles.registers else {}
    ssd_tree_hopper_kernel[(H * (V // (16 * WARPS)), B)](
        y_TC, *gates, *memory, steps.read_B, steps.write_B, steps.count_B, steps.path_BE, steps.parents_BN, out_THV,
        y_TC.stride(0), gates.dt_TH.stride(0), *(each.stride(0) for each in memory), N=N, E=E, G=G, H=H, K=K, V=V,
        STEPS=steps.max_depth.bit_length(), CHAIN=steps.is_chain, P=max(16, triton.next_power_of_2(N)),
        GROUP=min(GROUP, triton.next_power_of_2(E)), COPIED=tiles.copied, num_warps=WARPS,
        **limit, **chained(y_TC.device),
    )  # fmt: skip
