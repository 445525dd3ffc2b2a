"""The kernel of sample.py: finds the best token of one slice of a row; the merge of top-k finds the best of a row's slices.

The noise with which texts are sampled is defined in float64, whose logarithms are slow.  So the kernel scores all tokens with
noise in float32, which is off by 1e-5 at most, and then those again in float64 that are as good as the best within this error:
nearly always the best one alone.

Shapes: R rows, N tokens of a slice, S slices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.noise.cutoff import Cutoff
from specdec.ops.noise.gumbel_triton import gumbel_of_bits, noise_bits
from specdec.ops.topk_triton import make_key, merge_scanned, scan_slices, slice_size

_NEAR, _ULPS = tl.constexpr(1e-4), tl.constexpr(2e-6)  # thresholds for a lead: of the noise's error, and of rounding


@triton.jit
def exact_noise(bits):
    """float32: the noise of `noise_bits` as its definition says."""
    uniform = (bits.to(tl.float64) + 0.5) * 2.0**-52
    return -tl.log(-tl.log(uniform)).to(tl.float32)


@triton.jit
def first_best(score_N, i_N, SIZE: tl.constexpr):
    """(the largest score, its lowest place); NaN counts as infinity."""
    score_N = tl.where(score_N != score_N, float("inf"), score_N)
    top = tl.max(score_N, 0)
    return top, tl.min(tl.where(score_N < top, SIZE - 1, i_N), 0)


@triton.jit(do_not_specialize=["vocab", "stride_temperature", "stride_seed", "stride_position", "each"])
def sample_scan_kernel(
    logits,  # [R, V], any float type
    keys,  # [R, S, 1] int64
    temperatures,  # [B] float32
    seeds,  # [B] int64
    positions,  # [R] int64
    cutoff_logit,  # [R] float32, with HAS_CUTOFF
    last_id,  # [R] int64, with HAS_CUTOFF
    min_scaled,  # [R] float32, with HAS_CUTOFF
    vocab,
    stride_row,
    stride_temperature,
    stride_seed,
    stride_position,
    each,  # R / B
    SLICE: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,  # whether filters drop tokens
    ASM: tl.constexpr,  # see gumbel_triton.py
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SLICE
    i_N = tl.arange(0, SLICE)
    logits += row * stride_row
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    temperature = tl.load(temperatures + row // each * stride_temperature)
    seed = tl.load(seeds + row // each * stride_seed)
    position = tl.load(positions + row * stride_position)
    score_N = tl.load(logits + first + i_N, mask=first + i_N < vocab, other=-float("inf")).to(tl.float32)
    top, best = first_best(score_N, i_N, SLICE)
    goes_on = (temperature > 0) & (tl.abs(top) < float("inf"))
    if HAS_CUTOFF:
        logit = tl.load(cutoff_logit + row)
        stays_N = (score_N > logit) | ((score_N == logit) & (first + i_N <= tl.load(last_id + row)))
        safe_temperature = tl.where(temperature > 0, temperature, 1.0)
        stays_N &= tl.div_rn(score_N, tl.zeros_like(score_N) + safe_temperature) >= tl.load(min_scaled + row)
        if goes_on:
            score_N = tl.where(stays_N, score_N, -float("inf"))
            top, best = first_best(score_N, i_N, SLICE)
            goes_on = top > -float("inf")
    if goes_on:
        score_N = tl.div_rn(score_N, tl.zeros_like(score_N) + temperature)
        score_N += gumbel_of_bits(noise_bits(seed, position, (first + i_N).to(tl.int64)), ASM)
        top = tl.max(score_N, 0)
        leads_N = score_N >= top - (_NEAR + _ULPS * tl.abs(top))
        last, top = -1, -float("inf")
        for _ in range(tl.sum(leads_N.to(tl.int32), 0)):  # in the order of their ids
            last = tl.min(tl.where(leads_N & (i_N > last), i_N, SLICE - 1), 0)
            noise = exact_noise(noise_bits(seed, position, (first + last).to(tl.int64)))
            score = tl.div_rn(tl.load(logits + first + last).to(tl.float32), temperature) + noise
            best = tl.where(score > top, last, best)
            top = tl.maximum(score, top)
    tl.store(keys + row * tl.num_programs(1) + tl.program_id(1), make_key(top, first + best))


def launch_sampled_tokens(
    logits_RV: Tensor, temperature_B: Tensor, seed_B: Tensor, position_R: Tensor, cutoff: Cutoff | None = None
) -> Tensor:
    """`sample.sampled_tokens`: [R] int64."""
    R, V = logits_RV.shape
    assert logits_RV.stride(1) == 1 and R % seed_B.shape[0] == 0 and position_R.shape == (R,)
    assert temperature_B.dtype == torch.float32 and seed_B.dtype == position_R.dtype == torch.int64
    slices, size = scan_slices(R, V, 1), slice_size(R, V, 1)
    keys = torch.empty(R, slices, 1, dtype=torch.int64, device=logits_RV.device)
    ids = torch.empty(R, dtype=torch.int64, device=logits_RV.device)
    tensors = (temperature_B, seed_B, temperature_B) if cutoff is None else cutoff  # what a kernel doesn't need is not read
    if R:
        sample_scan_kernel[(R, slices)](
            logits_RV, keys, temperature_B, seed_B, position_R, *tensors, V, logits_RV.stride(0), temperature_B.stride(0),
            seed_B.stride(0), position_R.stride(0), R // seed_B.shape[0], SLICE=size, HAS_CUTOFF=cutoff is not None,
            ASM=logits_RV.is_cuda, num_warps=max(1, size // 1024), **chained(logits_RV.device),
        )  # fmt: skip
        merge_scanned((keys, keys), None, None, ids, finite=True)
    return ids
