"""The kernel of gumbel.py, and the noise as a function for other kernels.

A drafter's noise need not equal the target's to the last bit, since it only ranks drafts.  So kernels compute the logarithms in
float32, which is fast on every GPU, with formulas that stay within a few ulps of `gumbel_noise`.

Shapes: R rows, N tokens of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.noise.gumbel import GOLDEN, MIX_1, MIX_2, Noise

_GOLDEN = tl.constexpr(GOLDEN + 2**64)
_MIX_1 = tl.constexpr(MIX_1 + 2**64)
_MIX_2 = tl.constexpr(MIX_2 + 2**64)
BLOCK = 1024


@triton.jit
def mix_64(x):
    """`gumbel.mix_64` of uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def gumbel(seed, position, token_N):
    """float32: `gumbel.token_noise`.  seed: int64, a scalar; position: a scalar; token_N: int64."""
    key = mix_64(mix_64(seed.to(tl.uint64, bitcast=True) + _GOLDEN) + position.to(tl.uint64) * _GOLDEN)
    return gumbel_of_bits((mix_64(key + (token_N + 1).to(tl.uint64) * _GOLDEN) >> 12).to(tl.int64))


@triton.jit
def gumbel_of_bits(bits_N):
    """float32: the noise of int64 numbers of 52 random bits."""
    # The uniform number is (bits + 1/2) / 2**52.  Whichever of it and its distance to 1 is smaller loses no bit in float32.
    low_N = bits_N < 2**51
    least_N = (tl.where(low_N, bits_N, 2**52 - 1 - bits_N).to(tl.float32) + 0.5) * 2.0**-52
    # Close to 1, log(1 - x) takes x's digits from the quotient x / (1 - (1 - x)), whose denominator has no rounding error.
    x_N = tl.where(low_N, least_N, 1.0 - least_N)
    rounded_N = 1.0 - x_N
    exact_N = low_N | (rounded_N == 0.0)
    quotient_N = least_N / tl.where(exact_N, 1.0, rounded_N)
    exponential_N = -tl.log(x_N) * tl.where(low_N, 1.0, quotient_N)
    return -tl.log(tl.where(low_N | (rounded_N > 0.0), exponential_N, least_N))


@triton.jit
def perturbation(
    temperature, seeds, lens, offsets, b, stride_temperature, stride_seed, ahead, first, token_N, ok_N,
    LOGIT_WEIGHT: tl.constexpr, NOISE_WEIGHT: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """(the weight of the logits, the weighed noise [N]) of sequence b, for the tokens at position lens[b] + ahead.

    token_N: numbers within the run that begins with id `first`; where ok_N is false, any.
    """
    heat = tl.load(temperature + b * stride_temperature)
    id_N = first + token_N.to(tl.int64)
    if HAS_OFFSETS:
        id_N += tl.load(offsets + id_N, mask=ok_N, other=0)
    noise_N = gumbel(tl.load(seeds + b * stride_seed), tl.load(lens + b) + ahead, id_N)
    return tl.where(heat > 0.0, LOGIT_WEIGHT, 1.0), noise_N * (heat * NOISE_WEIGHT)


@triton.jit(do_not_specialize=["ahead", "first", "each", "width"])
def perturb_kernel(
    logits,  # [R, W], any float type
    out,  # [R, W] float32
    temperature,  # [B] float32
    seeds,  # [B] int64
    lens,  # [B] int32
    offsets,  # [V] int64
    stride_row,
    stride_temperature,
    stride_seed,
    ahead,
    first,
    each,  # rows of a sequence
    width,  # W
    LOGIT_WEIGHT: tl.constexpr,
    NOISE_WEIGHT: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token_N = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok_N = token_N < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    weight, noise_N = perturbation(
        temperature, seeds, lens, offsets, row // each, stride_temperature, stride_seed, ahead, first, token_N, ok_N,
        LOGIT_WEIGHT, NOISE_WEIGHT, HAS_OFFSETS,
    )  # fmt: skip
    x_N = tl.load(logits + row * stride_row + token_N, mask=ok_N, other=0.0).to(tl.float32)
    tl.store(out + row * width + token_N, x_N * weight + noise_N, mask=ok_N)


def noise_arguments(noise: Noise) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int]]:
    """What kernels read of the noise, in the order of `perturbation`: (temperatures, seeds, lengths), and the strides."""
    assert noise.temperature_B.dtype == torch.float32 and noise.seed_B.dtype == torch.int64 and noise.lens_B.stride(0) == 1
    tensors = noise.temperature_B, noise.seed_B, noise.lens_B
    return tensors, (noise.temperature_B.stride(0), noise.seed_B.stride(0))


def launch_perturb(logits_RW: Tensor, noise: Noise, offsets_V: Tensor | None, first: int) -> Tensor:
    """`gumbel.perturb`."""
    R, W = logits_RW.shape
    assert R % noise.seed_B.shape[0] == 0 and logits_RW.stride(1) == 1
    out = torch.empty(R, W, dtype=torch.float32, device=logits_RW.device)
    if out.numel():
        tensors, strides = noise_arguments(noise)
        perturb_kernel[(R, triton.cdiv(W, BLOCK))](
            logits_RW, out, *tensors, noise.seed_B if offsets_V is None else offsets_V, logits_RW.stride(0), *strides,
            noise.ahead, first, R // noise.seed_B.shape[0], W, LOGIT_WEIGHT=noise.logit_weight,
            NOISE_WEIGHT=noise.noise_weight, HAS_OFFSETS=offsets_V is not None, BLOCK=BLOCK, num_warps=4,
            **chained(logits_RW.device),
        )  # fmt: skip
    return out
