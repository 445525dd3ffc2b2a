"""The kernels of entropy.py: one program for each distribution forward, and one for each run of its tokens backward.

Shapes: N distributions, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8


@triton.jit
def soft_entropy_kernel(
    logits,  # [N, V]
    teacher,  # [N, V]
    entropy,  # [N] float32
    best,  # [N] int64
    sums,  # [2, N] float32: log of the sums of exponentials, of logits and of the teacher's
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top, total = -float("inf"), 0.0
    teacher_top, teacher_total, dot = -float("inf"), 0.0, 0.0
    place = 0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + at, mask=at < V, other=-float("inf")).to(tl.float32)
        y = tl.load(teacher + row * V + at, mask=at < V, other=-float("inf")).to(tl.float32)
        largest, index = tl.max(x, axis=0, return_indices=True)
        place = tl.where(largest > top, start + index, place)
        higher = tl.maximum(top, largest)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
        top = higher
        higher = tl.maximum(teacher_top, tl.max(y, axis=0))
        share = tl.exp(y - higher)
        less = tl.exp(teacher_top - higher)
        teacher_total = teacher_total * less + tl.sum(share, axis=0)
        dot = dot * less + tl.sum(share * tl.where(at < V, x, 0.0), axis=0)
        teacher_top = higher
    log_total = top + tl.log(total)
    tl.store(entropy + row, log_total - dot / teacher_total)
    tl.store(best + row, place)
    tl.store(sums + row, log_total)
    tl.store(sums + tl.num_programs(0) + row, teacher_top + tl.log(teacher_total))


@triton.jit
def soft_entropy_gradient_kernel(
    logits,  # [N, V]
    teacher,  # [N, V]
    sums,  # [2, N]
    grad,  # [N] float32
    out,  # [N, V]
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + at, mask=at < V, other=-float("inf")).to(tl.float32)
    y = tl.load(teacher + row * V + at, mask=at < V, other=-float("inf")).to(tl.float32)
    share = tl.exp(x - tl.load(sums + row)) - tl.exp(y - tl.load(sums + tl.num_programs(0) + row))
    tl.store(out + row * V + at, (share * tl.load(grad + row)).to(out.dtype.element_ty), mask=at < V)


def launch_entropy(logits_NV: Tensor, teacher_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy [N], likeliest tokens [N], logs of the sums [2, N])."""
    N, V = logits_NV.shape
    entropy_N, sums_2N = (logits_NV.new_empty(shape, dtype=torch.float32) for shape in ((N,), (2, N)))
    best_N = logits_NV.new_empty(N, dtype=torch.int64)
    soft_entropy_kernel[(N,)](logits_NV, teacher_NV, entropy_N, best_N, sums_2N, V, BLOCK=BLOCK, num_warps=WARPS)
    return entropy_N, best_N, sums_2N


def launch_gradient(logits_NV: Tensor, teacher_NV: Tensor, sums_2N: Tensor, grad_N: Tensor) -> Tensor:
    """[N, V]: the gradient of the entropies, each times its own number."""
    (N, V), out_NV = logits_NV.shape, torch.empty_like(logits_NV)
    grid = (N, triton.cdiv(V, BLOCK))
    soft_entropy_gradient_kernel[grid](logits_NV, teacher_NV, sums_2N, grad_N.float(), out_NV, V, BLOCK=BLOCK, num_warps=WARPS)
    return out_NV
