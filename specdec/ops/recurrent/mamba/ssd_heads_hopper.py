"""As ssd_tree_hopper.py, for passes of more heads than fit on a GPU at once: a program computes several of one group.

While it computes one head, the next one's state is on its way into shared memory, and what else belongs to that head into
registers, so that memory is never idle.  Queries, keys and their products are read and made once.  The pending path is added by
the tensor cores: keys have 16 bits, and what is added with them goes in as three numbers of 16 whose sum it is.

Shapes: as of ssd_tree_hopper.py; an item is a head, or 64 of its columns of values; E: 16 places of the pending path.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specdec.ops.hopper import barrier, copy_rows, gdc_launch_dependents, gdc_wait
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
from specdec.ops.recurrent.shared_triton import softplus
from specdec.ops.recurrent.trees.nodes_hopper import ancestors, nodes_layout, store_keys
from specdec.ops.recurrent.trees.state_hopper import as_operand, cut, halves, places, states_layout

PLACES = gl.constexpr(16)  # of the pending path that are added at once


@gluon.jit
def ssd_heads_hopper_kernel(
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
    CHAIN: gl.constexpr, P: gl.constexpr, ITEMS: gl.constexpr, SLICES: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    BLOCK_V: gl.constexpr = 16 * num_warps
    BLOCKS: gl.constexpr = V // BLOCK_V
    SHARES: gl.constexpr = H // G * BLOCKS // ITEMS  # programs of a group
    row, g, first = gl.program_id(1).to(gl.int64), gl.program_id(0) // SHARES, gl.program_id(0) * ITEMS
    states: gl.constexpr = states_layout(num_warps)
    values: gl.constexpr = states_layout(num_warps, P)
    paths: gl.constexpr = states_layout(num_warps, PLACES)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    wide_rows: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [num_warps, 1], [1, 0])
    nodes: gl.constexpr = nodes_layout(P, num_warps)
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, P, 16])
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    # Lanes that read rows two apart meet in no bank.
    turned: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, K], gl.NVMMASharedLayout(128, 16, 2))
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [P, K], gl.NVMMASharedLayout(128, 16, 2))
    path_smem = gl.allocate_shared_memory(gl.bfloat16, [PLACES, K], gl.NVMMASharedLayout(128, 16, 2))
    state_smem = gl.allocate_shared_memory(gl.float32, [K, BLOCK_V], turned)
    number, accepted = gl.load(read + row, cache_modifier=".cg"), gl.load(count + row, cache_modifier=".cg")
    k_R = gl.arange(0, K, gl.SliceLayout(1, wide_rows))
    from_state_R = state + number * stride_state + k_R * V
    copy_rows(state_smem, from_state_R + _state_of(first, BLOCKS, BLOCK_V, K, V), k_R < K, BLOCK_V, wide_rows)
    async_copy.commit_group()
    from_k, from_u, from_decay = (
        k_left + number * stride_k + g * K, u_left + number * stride_u, decay_left + number * stride_decay,
    )  # fmt: skip
    path = path + row * E
    end = gl.load(path + accepted - 1, mask=accepted > 0, other=0, cache_modifier=".cg")
    _store_path(path_smem, from_k, path, 0, accepted, G, K, wide_rows)
    u_SEV, decay_SE1, last = _read_added(
        from_u, from_decay, path, end, 0, accepted, first, BLOCKS, BLOCK_V, H, V, paths
    )  # fmt: skip
    head = first // BLOCKS
    rate, bias, skip = gl.load(A_log + head), gl.load(dt_bias + head), gl.load(D + head)
    bits_P, above = ancestors(parents + row * N, N, STEPS, CHAIN, P, num_warps)

    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y, dt, n_P = y + row * N * stride_y, dt + row * N * stride_dt, gl.arange(0, P, nodes)
    copy_nodes(y + g * K, stride_y, q_smem, k_smem, N, G, K, P, rows)
    x_SPV = read_values(y + 2 * G * K + first * BLOCK_V, stride_y, N, P, values)
    dt_P = gl.load(dt + head + n_P * stride_dt, mask=n_P < N, other=0.0)
    number = gl.load(write + row)
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    similar_RP = warpgroup_mma(
        q_smem, k_smem.permute((1, 0)), gl.zeros([64, P], gl.float32, of_state), use_acc=False, is_async=True
    )  # fmt: skip
    store_keys(y + (G + g) * K, k_left + number * stride_k + g * K, stride_y, N, G, K, SHARES, False, rows, num_warps)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    summed_smem = gl.allocate_shared_memory(gl.float32, [64], flat)
    step_smem = gl.allocate_shared_memory(gl.float32, [P], flat)
    faded_smem = gl.allocate_shared_memory(gl.float32, [P], flat)
    bits_smem = gl.allocate_shared_memory(bits_P.dtype, [64], flat)
    layout_PP: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * P), 16, 2)
    first_smem = gl.allocate_shared_memory(gl.bfloat16, [64, P], layout_PP)
    second_smem = gl.allocate_shared_memory(gl.bfloat16, [64, P], layout_PP)
    bits_smem.slice(0, P).store(bits_P)
    similar_RP, q_smem, k_smem = warpgroup_mma_wait(0, deps=(similar_RP, q_smem, k_smem))
    barrier()  # what follows may lie where other warps' products still read keys
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(4, P // 8), [1, 0])
    similar_smem = gl.allocate_shared_memory(gl.float32, [64, P], spread)
    similar_smem.store(similar_RP)
    # Numbers of a node that are not finite may reach those below it alone: `rule.without_broken`.  Of a query or a key they
    # show in the node's product with itself.
    known_P = gl.abs(diagonal(similar_RP, P, nodes)) < float("inf")
    s, n, v = places(P, values)
    n = 16 * s + n
    to_nodes, ok_SP1 = n * (H * V) + v, n + v * 0 < N
    q_KP = q_smem.slice(0, P, 0).permute((1, 0))
    for i in range(ITEMS):
        item = first + i
        head = item // BLOCKS
        step_P = softplus(dt_P.to(gl.float32) + bias.to(gl.float32))
        decay_P = gl.exp(rate.to(gl.float32)) * step_P
        sound_P = known_P & (decay_P < float("inf"))
        step_P, summed_P = gl.where(sound_P, step_P, 0.0), gl.where(sound_P, -decay_P, 0.0)
        for step in gl.static_range(len(above)):
            more_P = gl.gather(summed_P, gl.maximum(above[step], 0), 0)
            summed_P += gl.where(above[step] >= 0, more_P, 0.0)
        to_decay = decay_left + number * stride_decay + head + n_P * H
        gl.store(to_decay, summed_P, mask=(n_P < N) & (item % BLOCKS == 0))
        summed_smem.slice(0, P).store(summed_P)
        step_smem.store(step_P)
        faded_smem.store(gl.where(sound_P, gl.exp(summed_P), float("nan")))
        async_copy.wait_group(0)
        barrier()
        store_reads(similar_smem.load(of_state), summed_smem, step_smem, bits_smem, first_smem, second_smem, P, of_state)
        faded_P = faded_smem.load(gl.SliceLayout(0, of_state))
        steps = step_smem._reinterpret(gl.float32, [P // 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        step_SP1 = steps.load(gl.SliceLayout(2, values))[:, :, None]
        own_v, own_skip = item * BLOCK_V, skip.to(gl.float32)
        marked_SPV, x_u_SPV = marked(x_SPV, step_SP1)
        gl.store(u_left + number * stride_u + own_v + to_nodes, x_u_SPV, mask=ok_SP1)
        added = cut(u_SEV * gl.exp(last - decay_SE1), whole, num_warps)
        blocks = state_smem._reinterpret(gl.float32, [K // 16, 16, BLOCK_V], gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0]))
        raw_SKV = blocks.load(states) * gl.exp(last)
        fence_async_shared()
        barrier()
        following = gl.minimum(item + 1, first + ITEMS - 1)
        if ITEMS > 1:
            from_next_R = from_state_R + _state_of(following, BLOCKS, BLOCK_V, K, V)
            copy_rows(state_smem, from_next_R, (k_R < K) & (i + 1 < ITEMS), BLOCK_V, wide_rows)
            async_copy.commit_group()
        state_VK = _as_sums(raw_SKV, whole, num_warps)
        state_VK = _with_added(added, path_smem, state_VK)
        if E > PLACES:
            for begin in range(PLACES, accepted, PLACES):
                barrier()
                _store_path(path_smem, from_k, path, begin, accepted, G, K, wide_rows)
                more, decay, _ = _read_added(
                    from_u, from_decay, path, end, begin, accepted, item, BLOCKS, BLOCK_V, H, V, paths
                )  # fmt: skip
                fence_async_shared()
                barrier()
                state_VK = _with_added(cut(more * gl.exp(last - decay), whole, num_warps), path_smem, state_VK)
        state_SKV = by_node(state_VK, K, num_warps, states)
        s_, k_, v_ = places(K, states)
        to_state = state + number * stride_state + _state_of(item, BLOCKS, BLOCK_V, K, V)
        gl.store(to_state + k_ * V + v_ + s_ * (16 * V), state_SKV)
        products_VP = gl.zeros([BLOCK_V, P], gl.float32, of_state)
        if SLICES == 2:
            first_SKV, second_SKV = halves(state_SKV)
            parts = two_parts(first_SKV, of_state, num_warps)
            products_VP = multiplied(parts, q_KP.slice(0, K // 2), products_VP, True)
            products_VP, _, _, _ = warpgroup_mma_wait(0, deps=(products_VP, parts[0], parts[1], q_smem))
            parts = two_parts(second_SKV, of_state, num_warps)
            products_VP = multiplied(parts, q_KP.slice(K // 2, K // 2), products_VP, False)
        else:
            parts = two_parts(state_SKV, of_state, num_warps)
            products_VP = multiplied(parts, q_KP, products_VP, True)
        if ITEMS > 1:  # what else the next item needs
            head = following // BLOCKS
            u_SEV, decay_SE1, last = _read_added(
                from_u, from_decay, path, end, 0, accepted, following, BLOCKS, BLOCK_V, H, V, paths
            )  # fmt: skip
            rate, bias, skip = gl.load(A_log + head), gl.load(dt_bias + head), gl.load(D + head)
            x_SPV = read_values(y + 2 * G * K + following * BLOCK_V, stride_y, N, P, values)
            dt_P = gl.load(dt + head + n_P * stride_dt, mask=n_P < N, other=0.0)
        products_VP, _, _, _ = warpgroup_mma_wait(0, deps=(products_VP, parts[0], parts[1], q_smem))
        products_VP *= faded_P[None, :]
        x_VP = as_operand(without_marks(marked_SPV), of_state, num_warps)
        products_VP = warpgroup_mma(x_VP, first_smem.slice(0, P, 0).permute((1, 0)), products_VP, is_async=True)
        products_VP = warpgroup_mma(x_VP, second_smem.slice(0, P, 0).permute((1, 0)), products_VP, is_async=True)
        products_VP, _, _, _ = warpgroup_mma_wait(0, deps=(products_VP, x_VP, first_smem, second_smem))
        out_SPV = by_node(products_VP, P, num_warps, values) + own_skip * marked_SPV.to(gl.float32)
        gl.store(out + row * N * H * V + own_v + to_nodes, out_SPV.to(out.dtype.element_ty), mask=ok_SP1)


@gluon.jit
def _state_of(item, BLOCKS: gl.constexpr, BLOCK_V: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Where an item's state begins."""
    return item // BLOCKS * (K * V) + item % BLOCKS * BLOCK_V


@gluon.jit
def _store_path(smem, from_k, path, begin, accepted, G: gl.constexpr, K: gl.constexpr, layout: gl.constexpr):
    """Keys of accepted nodes, in shared memory; zeros where none is accepted."""
    e_E, k_K = begin + gl.arange(0, PLACES, gl.SliceLayout(1, layout)), gl.arange(0, K, gl.SliceLayout(0, layout))
    node_E = gl.load(path + e_E, mask=e_E < accepted, other=0, cache_modifier=".cg")
    from_EK = from_k + (node_E * (G * K))[:, None] + k_K[None, :]
    smem.store(gl.load(from_EK, mask=(e_E < accepted)[:, None], other=0.0, cache_modifier=".cg").to(gl.bfloat16))


@gluon.jit
def _read_added(
    from_u, from_decay, path, end, begin, accepted, item, BLOCKS: gl.constexpr, BLOCK_V: gl.constexpr, H: gl.constexpr,
    V: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(u [1, E, V], log-decays [1, E, 1] of accepted nodes, the last one's), of an item; zeros where none is accepted."""
    _, e, v = places(PLACES, layout)
    e, head = begin + e, item // BLOCKS
    node = gl.load(path + e, mask=e < accepted, other=0, cache_modifier=".cg")
    decay = gl.load(from_decay + head + node * H, mask=e < accepted, other=float("inf"), cache_modifier=".cg")
    last = gl.load(from_decay + head + end * H, mask=accepted > 0, other=0.0, cache_modifier=".cg")
    from_SEV = from_u + item * BLOCK_V + node * (H * V) + v
    return gl.load(from_SEV, mask=e + v * 0 < accepted, other=0.0, cache_modifier=".cg"), decay, last


@gluon.jit
def _as_sums(x_SKV, layout: gl.constexpr, num_warps: gl.constexpr):
    """[V, K], as the tensor cores keep sums, by which no thread gives anything away."""
    K: gl.constexpr = 16 * x_SKV.shape[0]
    ordered = gl.permute(gl.reshape(x_SKV, [K, num_warps, 8, 2]), (1, 3, 2, 0))
    return gl.convert_layout(gl.reshape(ordered, [16 * num_warps, K]), layout, assert_trivial=True)


@gluon.jit
def _with_added(parts, path_smem, state_VK):
    """The state with what accepted nodes add."""
    state_VK = warpgroup_mma(parts[0], path_smem, state_VK, is_async=True)
    state_VK = warpgroup_mma(parts[1], path_smem, state_VK, is_async=True)
    state_VK = warpgroup_mma(parts[2], path_smem, state_VK, is_async=True)
    state_VK, _, _, _, _ = warpgroup_mma_wait(0, deps=(state_VK, parts[0], parts[1], parts[2], path_smem))
    return state_VK
