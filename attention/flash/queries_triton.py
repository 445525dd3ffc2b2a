"""The kernels of queries.py.  One launch where a row holds few queries; of long prompts another one finds the largest absolute
values.

Order of chained launches (specdec/ops/launch.py): both kernels trigger early and read nothing before their wait.

Shapes: T queries, H heads, K kv heads, G = H/K, D head dim, R rows, S programs of a row and kv head, M queries x G of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.caches.quant_cache import FP8_MAX
from specdec.attention.flash import queries
from specdec.ops.launch import chained

MAX_FP8, MIN_SCALE, MANTISSA = tl.constexpr(FP8_MAX), tl.constexpr(queries.MIN_SCALE), tl.constexpr(queries.MANTISSA)
BLOCK_M = 64
FEW_BLOCKS = 4  # threshold: a program reads so many blocks twice sooner than two kernels start
MAX_PROGRAMS = 64  # of a row and kv head


@triton.jit
def gqa_pointers(q, first, count, start, kv_head, stride_t, stride_h, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Where a block of a row's queries stands, for the heads of one kv head, and which of them exist."""
    m = first + tl.arange(0, BLOCK_M)
    token_M, head_M = (start + m // GROUP).to(tl.int64), kv_head * GROUP + m % GROUP
    return q + token_M * stride_t + head_M * stride_h, m < count


@triton.jit
def largest_of(
    q, program, programs, count, start, kv_head, stride_t, stride_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The largest absolute value in one program's blocks; infinite if an element is not finite."""
    d = tl.arange(0, PADDED_DIM)
    amax_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    for first in range(program * BLOCK_M, count, programs * BLOCK_M):
        at_M, ok_M = gqa_pointers(q, first, count, start, kv_head, stride_t, stride_h, GROUP, BLOCK_M)
        x_MD = tl.load(at_M[:, None] + d[None, :], mask=ok_M[:, None] & (d < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
        amax_M = tl.maximum(amax_M, tl.max(tl.where(x_MD == x_MD, tl.abs(x_MD), float("inf")), 1))
    return tl.max(amax_M, 0)


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "largest"])
def largest_queries_kernel(
    q,  # [T, H, D]
    cu_seqlens,  # [R + 1] int32
    largest,  # [R, K, S] float32
    stride_t,
    stride_h,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    pair, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start, end = tl.load(cu_seqlens + pair // KV_HEADS), tl.load(cu_seqlens + pair // KV_HEADS + 1)
    amax = largest_of(
        q, program, programs, (end - start) * GROUP, start, pair % KV_HEADS, stride_t, stride_h,
        GROUP, HEAD_DIM, PADDED_DIM, BLOCK_M,
    )  # fmt: skip
    tl.store(largest + pair * programs + program, amax)


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "largest", "scale"])
def float8_queries_kernel(
    q,  # [T, H, D]
    cu_seqlens,  # [R + 1] int32
    largest,  # [R, K, S] float32; not read if S is 1
    out,  # [T, H, D] float8
    scale,  # [R, K] float32
    stride_t,
    stride_h,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PROGRAMS: tl.constexpr,  # S
    PADDED_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    pair, program = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start, end = tl.load(cu_seqlens + pair // KV_HEADS), tl.load(cu_seqlens + pair // KV_HEADS + 1)
    kv_head, count = pair % KV_HEADS, (end - start) * GROUP
    if PROGRAMS == 1:
        amax = largest_of(q, 0, 1, count, start, kv_head, stride_t, stride_h, GROUP, HEAD_DIM, PADDED_DIM, BLOCK_M)
    else:
        s = tl.arange(0, PADDED_PROGRAMS)
        amax = tl.max(tl.load(largest + pair * PROGRAMS + s, mask=s < PROGRAMS, other=0.0), 0)
    bits = tl.maximum(amax * (1 / MAX_FP8), MIN_SCALE).to(tl.int32, bitcast=True)
    own_scale = ((bits + MANTISSA) & ~MANTISSA).to(tl.float32, bitcast=True)
    if program == 0:
        tl.store(scale + pair, own_scale)
    d = tl.arange(0, PADDED_DIM)
    for first in range(program * BLOCK_M, count, PROGRAMS * BLOCK_M):
        at_M, ok_M = gqa_pointers(q, first, count, start, kv_head, stride_t, stride_h, GROUP, BLOCK_M)
        to_M, _ = gqa_pointers(out, first, count, start, kv_head, KV_HEADS * GROUP * HEAD_DIM, HEAD_DIM, GROUP, BLOCK_M)
        ok_MD = ok_M[:, None] & (d < HEAD_DIM)[None, :]
        x_MD = tl.load(at_M[:, None] + d[None, :], mask=ok_MD, other=0.0).to(tl.float32) * (1 / own_scale)
        tl.store(to_M[:, None] + d[None, :], x_MD.to(out.dtype.element_ty), mask=ok_MD)


def launch_float8_queries(
    q_THD: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    num_kv_heads: int,
    block_m: int = BLOCK_M,
    max_programs: int = MAX_PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """`float8_queries` in one launch, or in two.  max_programs: that share a row's queries of a kv head."""
    (T, H, D), R = q_THD.shape, cu_seqlens_q.shape[0] - 1
    assert q_THD.stride(2) == 1 and H % num_kv_heads == 0 and cu_seqlens_q.dtype == torch.int32
    out_THD = torch.empty((T, H, D), dtype=torch.float8_e4m3fn, device=q_THD.device)
    scale_RK = torch.empty((R, num_kv_heads), dtype=torch.float32, device=q_THD.device)
    group, pairs = H // num_kv_heads, R * num_kv_heads
    blocks = triton.cdiv(max_seqlen_q * group, block_m)
    programs = 1 if blocks <= FEW_BLOCKS else min(blocks, max_programs)
    dims = dict(KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=D, PADDED_DIM=triton.next_power_of_2(D), BLOCK_M=block_m)
    options = dict(num_warps=4, **chained(q_THD.device))
    largest, strides = scale_RK, q_THD.stride()[:2]
    if programs > 1:
        largest = torch.empty((R, num_kv_heads, programs), dtype=torch.float32, device=q_THD.device)
        largest_queries_kernel[(pairs, programs)](q_THD, cu_seqlens_q, largest, *strides, **dims, **options)
    float8_queries_kernel[(pairs, programs)](
        q_THD, cu_seqlens_q, largest, out_THD, scale_RK, *strides,
        PROGRAMS=programs, PADDED_PROGRAMS=triton.next_power_of_2(programs), **dims, **options,
    )  # fmt: skip
    return out_THD, scale_RK
