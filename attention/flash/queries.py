"""Queries in float8, as flash-attn 3 reads them over an fp8 cache: its kernel multiplies float8 by float8.

The queries of one sequence that share a kv head share one scale, a power of two.  So an element is rounded to float8
alike whatever its neighbours are: a query is rounded alike in a tree, a chain and a plain step, except for elements below 2^-14
of the largest.  This module knows no keys and no library.

Shapes: T queries, H heads, K kv heads, D head dim, R rows of a segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.caches.quant_cache import FP8_MAX
from specdec.ops.launch import use_kernels

MIN_SCALE = 2.0**-100  # of queries that are all zero: 1 / scale must be finite
MANTISSA = 2**23 - 1  # the bits of a float32 that hold its digits


def float8_queries(q_THD: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """The nearest float8 (e4m3fn) of queries / scale, and scale_RK, float32.

    Queries that belong to no row get arbitrary values, which nobody reads.
    cu_seqlens_q: int32 [R + 1]; row r holds the queries cu_seqlens_q[r] to cu_seqlens_q[r + 1], at most max_seqlen_q.
    An element that is not finite becomes NaN, and the scale of its row and kv head infinite.
    """
    if use_kernels(q_THD):
        from specdec.attention.flash.queries_triton import launch_float8_queries

        return launch_float8_queries(q_THD, cu_seqlens_q, max_seqlen_q, num_kv_heads)
    (T, _, _), R = q_THD.shape, cu_seqlens_q.shape[0] - 1
    q_TKGD = q_THD.float().unflatten(1, (num_kv_heads, -1))
    largest_TK = q_TKGD.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax((2, 3))
    row_T = torch.searchsorted(cu_seqlens_q[1:], torch.arange(T, dtype=torch.int32, device=q_THD.device), right=True)
    largest_RK = largest_TK.new_zeros(R + 1, num_kv_heads)  # the last row is that of queries without one
    largest_RK.scatter_reduce_(0, row_T[:, None].expand(-1, num_kv_heads), largest_TK, "amax")
    scale_RK = power_of_two(largest_RK * (1 / FP8_MAX))
    q_TKGD = q_TKGD * (1 / scale_RK)[row_T][:, :, None, None]
    return q_TKGD.flatten(1, 2).to(torch.float8_e4m3fn), scale_RK[:R]


def power_of_two(x: Tensor) -> Tensor:
    """The least power of two that is not below x (float32, not negative), and at least MIN_SCALE."""
    return ((x.clamp(min=MIN_SCALE).view(torch.int32) + MANTISSA) & ~MANTISSA).view(torch.float32)
