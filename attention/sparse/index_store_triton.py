"""The kernel between projection and scores of an indexer: the key's norm, rotary positions, and the key into its slot.

`store_index` in index_store.py defines what it computes.  The first program of a token handles its key and its weights, the
others its heads' queries.

Order of chained launches (specdec/ops/launch.py): positions and slots are read before gdc_wait, for the reason given in
kernels/rope_store_triton.py.  The trigger comes after the wait, so a store of latents that follows may do the same.

Shapes: T tokens, J heads, I head dim, R rotated dim, E = R / 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.latent.mla_store_triton import cos_sin_at, rotated, store_pairs
from specdec.attention.sparse.index_store import IndexPrep
from specdec.ops.launch import chained


@triton.jit
def normed(at, offset, ok, norm, bias, mean, inverse):
    """A part of a key under its LayerNorm."""
    x = tl.load(at + offset, mask=ok, other=0.0).to(tl.float32)
    weight = tl.load(norm + offset, mask=ok, other=0.0).to(tl.float32)
    return (x - mean) * inverse * weight + tl.load(bias + offset, mask=ok, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def store_index_kernel(
    q,  # [T, J, I], any strides but the last
    key,  # [T, I]
    weights,  # [T, J]
    index_keys,  # [slots, I]
    slots,  # [T] int64
    positions,  # [T] int64
    table,  # [P, 2, R]
    norm,  # [I]
    bias,  # [I]
    scaled,  # [T, J] float32
    eps,
    scale,
    stride_qt,
    stride_qj,
    stride_key,
    stride_weights,
    stride_slot,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED_HALF)
    ok_E = e < HALF
    position = tl.load(positions + token, cache_modifier=".cg")
    slot = tl.load(slots + token, cache_modifier=".cg")
    cos_sin = cos_sin_at(table, position, e, ok_E, HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    key += token * stride_key
    index_keys += slot * stride_slot
    if tl.program_id(1) == 0:
        i = tl.arange(0, PADDED_DIM)
        ok_I = i < DIM
        x_I = tl.load(key + i, mask=ok_I, other=0.0).to(tl.float32)
        mean = tl.sum(x_I, 0) / DIM
        centred_I = tl.where(ok_I, x_I - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(centred_I * centred_I, 0) / DIM + eps)
        rest_I = ok_I & (i >= 2 * HALF)
        tl.store(index_keys + i, normed(key, i, rest_I, norm, bias, mean, inverse).to(index_keys.dtype.element_ty), mask=rest_I)
        low_E = normed(key, e, ok_E, norm, bias, mean, inverse)
        high_E = normed(key, HALF + e, ok_E, norm, bias, mean, inverse)
        cos_low_E, cos_high_E, sin_low_E, sin_high_E = cos_sin
        tl.store(index_keys + e, (low_E * cos_low_E + high_E * sin_low_E).to(index_keys.dtype.element_ty), mask=ok_E)
        tl.store(index_keys + HALF + e, (high_E * cos_high_E + low_E * sin_high_E).to(index_keys.dtype.element_ty), mask=ok_E)
        h = tl.arange(0, PADDED_HEADS)  # not j: a name must mean one shape in both branches
        weight_H = tl.load(weights + token * stride_weights + h, mask=h < HEADS, other=0.0).to(tl.float32)
        tl.store(scaled + token * HEADS + h, weight_H * scale, mask=h < HEADS)
    else:
        j = (tl.program_id(1) - 1) * BLOCK_J + tl.arange(0, BLOCK_J)
        ok_JE = (j < HEADS)[:, None] & ok_E[None, :]
        at_JE = q + token * stride_qt + j[:, None] * stride_qj + e[None, :]
        store_pairs(rotated(at_JE, ok_JE, cos_sin, HALF), at_JE, ok_JE, HALF)


def launch_store_index(
    index_keys_NI: Tensor, q_TJI: Tensor, key_TI: Tensor, weights_TJ: Tensor, slots_T: Tensor, prep: IndexPrep
) -> Tensor:
    """`store_index`: keys go into index_keys_NI, queries are rotated in place.  Returns the scaled weights [T, J] float32."""
    (T, J, I), table = q_TJI.shape, prep.rotation.table_P2D
    R = table.shape[2]
    assert key_TI.shape == (T, I) and weights_TJ.shape == (T, J) and slots_T.shape == (T,) and index_keys_NI.shape[1] == I
    assert table.is_contiguous() and R <= I and prep.norm_I.shape == prep.bias_I.shape == (I,)
    assert q_TJI.stride(2) == key_TI.stride(1) == weights_TJ.stride(1) == index_keys_NI.stride(1) == 1
    scaled_TJ = torch.empty(T, J, dtype=torch.float32, device=key_TI.device)
    block_j = min(triton.next_power_of_2(J), 32)
    if T:
        store_index_kernel[(T, 1 + triton.cdiv(J, block_j))](
            q_TJI, key_TI, weights_TJ, index_keys_NI, slots_T.contiguous(), prep.rotation.positions_T.contiguous(), table,
            prep.norm_I, prep.bias_I, scaled_TJ, prep.eps, prep.scale,
            *q_TJI.stride()[:2], key_TI.stride(0), weights_TJ.stride(0), index_keys_NI.stride(0),
            HEADS=J, PADDED_HEADS=triton.next_power_of_2(J), DIM=I, PADDED_DIM=triton.next_power_of_2(I), HALF=R // 2,
            PADDED_HALF=triton.next_power_of_2(R // 2), BLOCK_J=block_j, num_warps=2, **chained(key_TI.device),
        )  # fmt: skip
    return scaled_TJ
