"""The kernel of `kimi_delta.tree_outputs` of trees of more than one node: a program computes some columns of a head's values.

It reads its part of the state once, adds the pending path, and writes it once.  All of that but the writing comes before its
wait: states and what nodes left are a round old.  What nodes have to do with each other comes from nodes_triton.py, which runs
before.  No program reads what another one of its launch writes.

Shapes: as of kimi_delta.py; P: rows and columns of the nodes' matrices, N or more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.kimi.path_triton import add_kimi_path, add_kimi_rest, kimi_faded, read_kimi_path
from specdec.ops.recurrent.trees.path_triton import read_state
from specdec.ops.recurrent.trees.rule_triton import nodes_matrices


@triton.jit
def kimi_rule_kernel(
    y,  # [B * N, 2 H K + H V]
    solved,  # [B, H, 2 P P + 2 P]: see nodes_triton.py
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., H, K], [L, .., H, V], [L, .., H, K]
    read, write, count,  # [B]
    path,  # [B, E]
    out,  # [B * N, H, V]
    stride_y, stride_state, stride_k, stride_u, stride_decay,
    N: tl.constexpr, E: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    PRECISION: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, h, block = tl.program_id(1).to(tl.int64), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    number, accepted = tl.load(read + row, cache_modifier=".cg"), tl.load(count + row, cache_modifier=".cg")
    to_state_KV = state + h * K * V + tl.arange(0, BLOCK_K)[:, None] * V + v[None, :]
    from_k, from_decay = k_left + number * stride_k + h * K, decay_left + number * stride_decay + h * K
    from_u_V, path = u_left + number * stride_u + h * V + v, path + row * E
    raw = read_state(to_state_KV + number * stride_state, K, V, BLOCK_K)
    decays, added, keys, last = read_kimi_path(from_k, from_u_V, from_decay, path, 0, accepted, H, K, V, GROUP, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.load(write + row)
    y, own = y + row * N * stride_y, solved + (row * H + h) * (2 * P * P + 2 * P)
    # Queries and keys are one matrix of 2 P rows (I), and so are outputs and u: products take 16 rows at least.
    i, k, n = tl.arange(0, 2 * P), tl.arange(0, BLOCK_K), tl.arange(0, P)
    node = i % P
    ok_I1, ok_N1 = (node < N)[:, None], (n < N)[:, None]
    from_IK = y + h * K + (node * stride_y + tl.where(i >= P, H * K, 0))[:, None] + k[None, :]
    from_decay_IK = decay_left + number * stride_decay + (node * H + h)[:, None] * K + k[None, :]
    v_NV = tl.load(y + 2 * H * K + h * V + n[:, None] * stride_y + v[None, :], mask=ok_N1, other=0.0).to(tl.float32)
    length_I = tl.load(own + 2 * P * P + i)
    tiles = add_kimi_path(kimi_faded(raw, last, K // BLOCK_K), decays, added, keys, last, K // BLOCK_K, GROUP)
    if E > GROUP:
        tiles = add_kimi_rest(tiles, from_k, from_u_V, from_decay, path, accepted, H, K, V, GROUP, BLOCK_K)
    products_IV = tl.zeros([2 * P, BLOCK_V], tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        block_IK = tl.load(from_IK + step * BLOCK_K, mask=ok_I1, other=0.0).to(tl.float32)
        summed_IK = tl.load(from_decay_IK + step * BLOCK_K, mask=ok_I1, other=0.0)
        # What is not sound has a key's length of 0, and may be NaN here.
        faded_IK = tl.where((length_I != 0)[:, None], block_IK * length_I[:, None], 0.0) * tl.exp(summed_IK)
        products_IV = tl.dot(faded_IK, tiles[step], products_IV, input_precision=PRECISION)
    for step in tl.static_range(K // BLOCK_K):
        tl.store(to_state_KV + number * stride_state + step * BLOCK_K * V, tiles[step])
    out_NV, u_NV = _solved(nodes_matrices(own, P), products_IV, v_NV, P, PRECISION)
    to_NV = (n * H * V + h * V)[:, None] + v[None, :]
    tl.store(out + row * N * H * V + to_NV, out_NV.to(out.dtype.element_ty), mask=ok_N1)
    tl.store(u_left + number * stride_u + to_NV, u_NV, mask=ok_N1)


@triton.jit
def _solved(solved_IJ, products_IV, v_NV, P: tl.constexpr, PRECISION: tl.constexpr):
    """(outputs, u): see nodes_triton.py.  What is not finite is NaN in its own output, and reaches nobody else."""
    V: tl.constexpr = products_IV.shape[1]
    sound_NV = tl.abs(v_NV) < float("inf")
    q_state_NV, k_state_NV = tl.split(tl.permute(tl.reshape(products_IV, [2, P, V]), (1, 2, 0)))
    right_NV = tl.where(sound_NV, v_NV, 0.0) - k_state_NV
    right_NV = tl.where(tl.abs(right_NV) < float("inf"), right_NV, 0.0)
    if P == 8:
        right_NV = tl.reshape(tl.permute(tl.join(tl.zeros_like(right_NV), right_NV), (2, 0, 1)), [2 * P, V])
    result_IV = tl.dot(solved_IJ, right_NV, input_precision=PRECISION)
    out_NV, u_NV = tl.split(tl.permute(tl.reshape(result_IV, [2, P, V]), (1, 2, 0)))
    return tl.where(sound_NV, out_NV + q_state_NV, float("nan")), u_NV
