"""The kernels of gumbel.py, and the noise as a function for other kernels.

The noise with which the target samples is computed in float64, as its definition says, since texts depend on its last bits.
A drafter's noise need not equal the target's to the last bit, since it only ranks drafts.  So kernels compute the logarithms in
float32 and with the GPU's own instruction, which is fast on every GPU; the result is within 1e-5 of `gumbel_noise`.

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
_NEAR = tl.constexpr(2.0**-4)  # threshold: up to this the series' next term is below 1e-7 of the sum
BLOCK = 1024


@triton.jit
def mix_64(x):
    """`gumbel.mix_64` of uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _log(x, ASM: tl.constexpr):
    """The natural logarithm.  ASM: by the GPU's own instruction, one in place of the two dozen of `tl.log`."""
    if ASM:
        log_2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return log_2 * 0.6931471805599453
    return tl.log(x)


@triton.jit
def noise_bits(seed, position, token_N):
    """int64: the 52 random bits of each token.  seed: int64, a scalar; position: a scalar; token_N: int64."""
    key = mix_64(mix_64(seed.to(tl.uint64, bitcast=True) + _GOLDEN) + position.to(tl.uint64) * _GOLDEN)
    return (mix_64(key + (token_N + 1).to(tl.uint64) * _GOLDEN) >> 12).to(tl.int64)


@triton.jit(do_not_specialize=["stride_seed", "stride_position", "first"])
def gumbel_noise_kernel(
    seeds,  # [R] int64
    positions,  # [R] int64
    out,  # [R, V] float32
    stride_seed,
    stride_position,
    first,
    width,  # V
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token_N = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions + row * stride_position)
    bits_N = noise_bits(tl.load(seeds + row * stride_seed), position, first + token_N.to(tl.int64))
    uniform_N = (bits_N.to(tl.float64) + 0.5) * 2.0**-52
    tl.store(out + row * width + token_N, -tl.log(-tl.log(uniform_N)).to(tl.float32), mask=token_N < width)


@triton.jit
def gumbel_of_bits(bits_N, ASM: tl.constexpr):
    """float32: the noise of `noise_bits`, in float32 arithmetic.  ASM: see `_log`."""
    # The uniform number x is (bits + 1/2) / 2**52.  Whichever of x and 1 - x is smaller loses no digit in float32.
    is_small_N = bits_N < 2**51
    least_N = (tl.where(is_small_N, bits_N, 2**52 - 1 - bits_N).to(tl.float32) + 0.5) * 2.0**-52
    # -log(x), by the series of -log(1 - least) where x is so close to 1 that its logarithm would lose digits.
    direct_N = -_log(tl.where(is_small_N, least_N, 1.0 - least_N), ASM)
    series_N = 1 / 2 + least_N * (1 / 3 + least_N * (1 / 4 + least_N * (1 / 5 + least_N * (1 / 6))))
    near_N = least_N + least_N * least_N * series_N
    return -_log(tl.where(is_small_N | (least_N > _NEAR), direct_N, near_N), ASM)


@triton.jit
def perturbation(
    temperatures, seeds, lens, offsets, b, stride_temperature, stride_seed, ahead, first, token_N, ok_N,
    LOGIT_WEIGHT: tl.constexpr, NOISE_WEIGHT: tl.constexpr, HAS_OFFSETS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """(the weight of the logits, the weighed noise [N]) of sequence b, for the tokens at position lens[b] + ahead.

    token_N: numbers within the run that begins with id `first`; where ok_N is false, any.
    """
    temperature = tl.load(temperatures + b * stride_temperature, cache_modifier=".cg")
    id_N = first + token_N.to(tl.int64)
    if HAS_OFFSETS:
        id_N += tl.load(offsets + id_N, mask=ok_N, other=0)
    seed, length = tl.load(seeds + b * stride_seed, cache_modifier=".cg"), tl.load(lens + b, cache_modifier=".cg")
    bits_N = noise_bits(seed, length + ahead, id_N)
    noise_N = gumbel_of_bits(bits_N, ASM)
    return tl.where(temperature > 0.0, LOGIT_WEIGHT, 1.0), noise_N * (temperature * NOISE_WEIGHT)


@triton.jit
def steepened(x_N, cutoff, CUTOFF_WEIGHT: tl.constexpr):
    """Logits, of which the distance below the cutoff counts CUTOFF_WEIGHT times more."""
    cutoff = tl.maximum(cutoff, -1e38)  # so that -inf has a distance from it
    return tl.where(x_N < cutoff, x_N + (x_N - cutoff) * CUTOFF_WEIGHT, x_N)


@triton.jit(do_not_specialize=["ahead", "first", "each", "width"])
def perturb_kernel(
    logits,  # [R, W], any float type
    out,  # [R, W] float32
    temperatures,  # [B] float32
    seeds,  # [B] int64
    lens,  # [B] int32
    offsets,  # [V] int64
    cutoff,  # [R] float32
    stride_row,
    stride_temperature,
    stride_seed,
    ahead,
    first,
    each,  # rows of a sequence
    width,  # W
    LOGIT_WEIGHT: tl.constexpr,
    NOISE_WEIGHT: tl.constexpr,
    CUTOFF_WEIGHT: tl.constexpr,  # 0: there is no cutoff
    HAS_OFFSETS: tl.constexpr,
    ASM: tl.constexpr,
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
        temperatures, seeds, lens, offsets, row // each, stride_temperature, stride_seed, ahead, first, token_N, ok_N,
        LOGIT_WEIGHT, NOISE_WEIGHT, HAS_OFFSETS, ASM,
    )  # fmt: skip
    x_N = tl.load(logits + row * stride_row + token_N, mask=ok_N, other=0.0).to(tl.float32)
    if CUTOFF_WEIGHT > 0:
        x_N = steepened(x_N, tl.load(cutoff + row), CUTOFF_WEIGHT)
    tl.store(out + row * width + token_N, x_N * weight + noise_N, mask=ok_N)


def launch_gumbel_noise(seed_R: Tensor, position_R: Tensor, vocab_size: int, first: int) -> Tensor:
    """`gumbel.gumbel_noise`."""
    R = seed_R.shape[0]
    assert seed_R.dtype == position_R.dtype == torch.int64 and position_R.shape == (R,)
    out = torch.empty(R, vocab_size, dtype=torch.float32, device=seed_R.device)
    if out.numel():
        gumbel_noise_kernel[(R, triton.cdiv(vocab_size, BLOCK))](
            seed_R, position_R, out, seed_R.stride(0), position_R.stride(0), first, vocab_size, BLOCK=BLOCK, num_warps=4,
            **chained(seed_R.device),
        )  # fmt: skip
    return out


def noise_arguments(noise: Noise) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int]]:
    """What kernels read of the noise, in the order of `perturbation`: (temperatures, seeds, lengths), and the strides."""
    assert noise.temperature_B.dtype == torch.float32 and noise.seed_B.dtype == torch.int64 and noise.lens_B.stride(0) == 1
    tensors = noise.temperature_B, noise.seed_B, noise.lens_B
    return tensors, (noise.temperature_B.stride(0), noise.seed_B.stride(0))


def launch_perturb(
    logits_RW: Tensor, noise: Noise, offsets_V: Tensor | None, first: int, cutoff_R: Tensor | None = None
) -> Tensor:
    """`gumbel.perturb`."""
    R, W = logits_RW.shape
    assert R % noise.seed_B.shape[0] == 0 and logits_RW.stride(1) == 1
    out = torch.empty(R, W, dtype=torch.float32, device=logits_RW.device)
    if out.numel():
        tensors, strides = noise_arguments(noise)
        perturb_kernel[(R, triton.cdiv(W, BLOCK))](
            logits_RW, out, *tensors, noise.seed_B if offsets_V is None else offsets_V, out if cutoff_R is None else cutoff_R,
            logits_RW.stride(0), *strides, noise.ahead, first, R // noise.seed_B.shape[0], W,
            LOGIT_WEIGHT=noise.logit_weight, NOISE_WEIGHT=noise.noise_weight,
            CUTOFF_WEIGHT=0.0 if cutoff_R is None else noise.cutoff_weight, HAS_OFFSETS=offsets_V is not None,
            ASM=logits_RW.is_cuda, BLOCK=BLOCK, num_warps=4, **chained(logits_RW.device),
        )  # fmt: skip
    return out
