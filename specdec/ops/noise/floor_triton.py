"""The kernel of floor.py: one program for each row, which reads the row twice, the second time from the GPU's cache.

Shapes: R rows, N tokens of a block, C bins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.noise.floor import BINS, PER_UNIT, Filters

MOST = 32768  # tokens that a program holds in registers


@triton.jit(do_not_specialize=["each", "stride_floats", "stride_ints"])
def least_logits_kernel(
    logits,  # [R, W], any float type
    floor,  # [R] float32
    temperature,  # [B] float32
    top_k,  # [B] int64
    top_p,  # [B] float32
    min_p,  # [B] float32
    stride_row,
    stride_floats,
    stride_ints,
    each,  # rows of a sequence
    width,  # W
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    PER_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i_N = tl.arange(0, BLOCK)
    c_C = tl.arange(0, BINS)
    b = row // each
    heat = tl.load(temperature + b * stride_floats)
    few = tl.load(top_k + b * stride_ints)
    share = tl.load(top_p + b * stride_floats)
    least = tl.load(min_p + b * stride_floats)
    logits += row * stride_row
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    top_N = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, width, BLOCK):
        x_N = tl.load(logits + start + i_N, mask=start + i_N < width, other=-float("inf")).to(tl.float32)
        top_N = tl.maximum(top_N, x_N)
    largest = tl.max(top_N, 0)
    scale = PER_UNIT / tl.where(heat > 0.0, heat, 1.0)
    count_C = tl.zeros([BINS], tl.int32)
    for start in range(0, width, BLOCK):
        x_N = tl.load(logits + start + i_N, mask=start + i_N < width, other=-float("inf")).to(tl.float32)
        depth_N = (largest - x_N) * scale
        count_C += tl.histogram(tl.where(depth_N < BINS - 1, depth_N, BINS - 1).to(tl.int32), BINS)
    count_C -= tl.where(c_C == BINS - 1, tl.cdiv(width, BLOCK) * BLOCK - width, 0)  # what lies after the row's end
    enough_C = tl.cumsum(count_C, 0) >= tl.where(few > 0, few, 2**31 - 1)
    last = tl.min(tl.where(enough_C, c_C, BINS - 1), 0)
    mass_C = count_C.to(tl.float32) * tl.exp((c_C.to(tl.float32) + 0.5) * (-1.0 / PER_UNIT))
    mass_C = tl.where(c_C <= last, mass_C, 0.0)
    enough_C = tl.cumsum(mass_C, 0) >= tl.where(share < 1.0, share, 2.0) * tl.sum(mass_C, 0)
    last = tl.minimum(last, tl.min(tl.where(enough_C, c_C, BINS - 1), 0))
    edge = tl.where(last < BINS - 1, largest - heat * ((last + 1).to(tl.float32) / PER_UNIT), -float("inf"))
    edge = tl.maximum(edge, tl.where(least > 0.0, largest + heat * tl.log(tl.maximum(least, 1e-30)), -float("inf")))
    tl.store(floor + row, tl.where(heat > 0.0, edge, -float("inf")))


def launch_least_logits(logits_RW: Tensor, filters: Filters) -> Tensor:
    """`floor.least_logits`."""
    (R, W), floats = logits_RW.shape, (filters.temperature_B, filters.top_p_B, filters.min_p_B)
    assert logits_RW.stride(1) == 1 and all(x.dtype == torch.float32 and x.stride() == floats[0].stride() for x in floats)
    assert filters.top_k_B.dtype == torch.int64 and R % filters.top_k_B.shape[0] == 0
    out = torch.empty(R, dtype=torch.float32, device=logits_RW.device)
    block = min(MOST, triton.next_power_of_2(W))
    if R:
        least_logits_kernel[(R,)](
            logits_RW, out, filters.temperature_B, filters.top_k_B, filters.top_p_B, filters.min_p_B, logits_RW.stride(0),
            floats[0].stride(0), filters.top_k_B.stride(0), R // filters.top_k_B.shape[0], W, BLOCK=block, BINS=BINS,
            PER_UNIT=PER_UNIT, num_warps=min(16, max(1, block // 512)), **chained(logits_RW.device),
        )  # fmt: skip
    return out
