"""The kernels of topk.py: `scan_kernel` finds the best tokens of one slice of a row, `merge_kernel` the best of a row's slices.

The scan hands keys to the merge.  A key has 64 bits: a float32 encoded as an integer of the same order, above the inverted
token id.  The largest key is the best token, and keys never tie.  `merge_rows` is for kernels elsewhere that continue with a
row's best tokens.

Shapes: R rows, N tokens of a slice, S slices, M = S * k keys of a row, C = k best (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.noise.approximate_cutoff import approximate_cutoffs
from specdec.ops.noise.gumbel import Noise
from specdec.ops.noise.gumbel_triton import noise_arguments, perturbation, steepened

LOWEST_32 = tl.constexpr(-(2**31))
LOWEST_64 = tl.constexpr(-(2**63))
PROGRAMS = 256  # programs that fill a GPU
ORDERED_SLICE = 4096  # tokens of a slice where sums have one order
MAX_KEYS = 64  # threshold: slices are made larger until a row has at most this many keys to merge


@triton.jit
def ordered_16(x):
    """int32 numbers of the same order as 16-bit floats: -0.0 counts as 0.0, NaN as larger than all."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    bits = tl.where(bits == -32768, 0, bits)
    value = x.to(tl.float32)
    return tl.where(value != value, 0x7FFF, bits ^ ((bits >> 15) & 0x7FFF))


@triton.jit
def ordered_32(x):
    """int32 numbers of the same order as float32: -0.0 counts as 0.0, NaN as larger than all."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == LOWEST_32, 0, bits)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of_32(ordered):
    """The float32 that `ordered_32` encoded (-0.0 comes back as 0.0)."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def make_key(value, index):
    """The 64-bit key of a float32 value at an index below 2**31."""
    return (ordered_32(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def key_index(key):
    """The index that a key holds."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def key_value(key):
    """The float32 that a key holds (-0.0 comes back as 0.0)."""
    return value_of_32((key >> 32).to(tl.int32))


@triton.jit(do_not_specialize=["stride_temperature", "stride_seed", "ahead", "each"])
def scan_kernel(
    logits,  # [R, V], any float type
    keys,  # [R, S, k] int64
    sums,  # [R, S] float32: sum of exp(logit - the slice's largest)
    temperatures,  # [B] float32
    seeds,  # [B] int64
    lens,  # [B] int32
    offsets,  # [V] int64
    cutoff,  # [R] float32
    vocab,
    stride_row,
    stride_temperature,
    stride_seed,
    ahead,
    each,  # R / B
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SLICE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    LOGIT_WEIGHT: tl.constexpr,
    NOISE_WEIGHT: tl.constexpr,  # 0: no noise
    CUTOFF_WEIGHT: tl.constexpr,  # 0: no cutoff
    HAS_OFFSETS: tl.constexpr,
    ASM: tl.constexpr,  # see gumbel_triton.py
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = row * tl.num_programs(1) + tl.program_id(1)
    first = tl.program_id(1) * SLICE
    i_N = tl.arange(0, SLICE)
    c_C = tl.arange(0, PADDED_K)
    ok_N = first + i_N < vocab
    logits += row * stride_row
    if NOISE_WEIGHT > 0:
        weight, noise_N = perturbation(
            temperatures, seeds, lens, offsets, row // each, stride_temperature, stride_seed, ahead, 0, first + i_N, ok_N,
            LOGIT_WEIGHT, NOISE_WEIGHT, HAS_OFFSETS, ASM,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_N = tl.load(logits + first + i_N, mask=ok_N, other=-float("inf"))
    value_N = x_N.to(tl.float32)
    if NOISE_WEIGHT > 0:
        if CUTOFF_WEIGHT > 0:
            value_N = steepened(value_N, tl.load(cutoff + row), CUTOFF_WEIGHT)
        value_N = value_N * weight + noise_N
    top = tl.max(value_N, 0)
    if SOFTMAX:
        shift = tl.where(top == -float("inf"), 0.0, top)
        tl.store(sums + place, tl.sum(tl.exp(value_N - shift), 0))
    if K == 1:  # comparing floats takes half as many instructions as making keys
        value_N = tl.where(value_N != value_N, float("inf"), value_N)
        best = tl.min(tl.where(value_N < tl.max(value_N, 0), SLICE - 1, i_N), 0)
        token_C = first + best + c_C
    else:
        if NOISE_WEIGHT > 0 or x_N.dtype == tl.float32:
            key_N = (ordered_32(value_N).to(tl.int64) << 32) | (SLICE - 1 - i_N)
            lowest = tl.full([], LOWEST_64, tl.int64)
        else:  # 16 bits of value above 16 bits of place: one instruction compares two keys
            key_N = (ordered_16(x_N) << 16) | (SLICE - 1 - i_N)
            lowest = tl.full([], LOWEST_32, tl.int32)
        key_N = tl.where(ok_N, key_N, lowest)
        best_C = tl.zeros_like(c_C).to(key_N.dtype)
        for i in range(K):
            best = tl.max(key_N, 0)
            key_N = tl.where(key_N == best, lowest, key_N)
            best_C = tl.where(c_C == i, best, best_C)
        # A slice of fewer than K tokens has no K best.  The rest get ids past the vocabulary, and keys below all others.
        token_C = first + (SLICE - 1 - (best_C & (SLICE - 1)).to(tl.int32))
    ok_C = c_C < K
    if NOISE_WEIGHT == 0:
        value_C = tl.load(logits + token_C, mask=ok_C & (token_C < vocab), other=-float("inf")).to(tl.float32)
    elif K == 1:
        value_C = tl.max(value_N, 0) + tl.zeros_like(c_C).to(tl.float32)
    else:
        value_C = tl.where(token_C < vocab, key_value(best_C), -float("inf"))
    tl.store(keys + place * K + c_C, make_key(value_C, token_C), mask=ok_C)


@triton.jit
def merge_rows(
    keys, sums, row_R, ok_R, slices,
    K: tl.constexpr, PADDED_K: tl.constexpr, PADDED_M: tl.constexpr, PADDED_S: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """(ids int32, log-probabilities float32, keys int64), [R, C] each, of rows that were scanned.

    Without SOFTMAX the log-probabilities are 0.
    """
    m_M = tl.arange(0, PADDED_M)
    c_C = tl.arange(0, PADDED_K)
    lowest = tl.full([], LOWEST_64, tl.int64)
    from_R = row_R.to(tl.int64) * slices
    ok_RM = ok_R[:, None] & (m_M < slices * K)[None, :]
    key_RM = tl.load(keys + from_R[:, None] * K + m_M[None, :], mask=ok_RM, other=LOWEST_64)
    top_RC = tl.zeros_like(row_R[:, None] + c_C[None, :]).to(tl.int64) + lowest
    for i in range(K):
        best_R = tl.max(key_RM, 1)
        key_RM = tl.where(key_RM == best_R[:, None], lowest, key_RM)
        top_RC = tl.where((c_C == i)[None, :], best_R[:, None], top_RC)
    logp_RC = tl.zeros_like(top_RC).to(tl.float32)
    if SOFTMAX:
        s_S = tl.arange(0, PADDED_S)
        ok_RS = ok_R[:, None] & (s_S < slices)[None, :]
        at_RS = from_R[:, None] + s_S[None, :]
        peak_RS = key_value(tl.load(keys + at_RS * K, mask=ok_RS, other=0))
        sum_RS = tl.load(sums + at_RS, mask=ok_RS, other=0.0)
        peak_R = key_value(tl.max(top_RC, 1))
        total_R = tl.sum(tl.where(ok_RS, sum_RS * tl.exp(peak_RS - peak_R[:, None]), 0.0), 1)
        total_R = tl.where(ok_R, total_R, 1.0)
        logp_RC = (key_value(top_RC) - peak_R[:, None]) - tl.log(total_R)[:, None]
        logp_RC = tl.where(logp_RC > 0.0, 0.0, logp_RC)
    return key_index(top_RC), logp_RC, top_RC


@triton.jit(do_not_specialize=["slices"])
def merge_kernel(
    keys,  # [R, S, k] int64
    sums,  # [R, S] float32
    offsets,  # [V] int64
    logp,  # [R, k] float32
    ids,  # [R, k] int64
    slices,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_M: tl.constexpr,
    PADDED_S: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    FINITE: tl.constexpr,  # rows whose best logit is not finite give -1
    PDL: tl.constexpr,
):
    row_R = tl.program_id(0) + tl.arange(0, 1)
    c_C = tl.arange(0, PADDED_K)
    ok_RC = (row_R >= 0)[:, None] & (c_C < K)[None, :]
    at_RC = row_R.to(tl.int64)[:, None] * K + c_C[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    id_RC, logp_RC, top_RC = merge_rows(keys, sums, row_R, row_R >= 0, slices, K, PADDED_K, PADDED_M, PADDED_S, SOFTMAX)
    id_RC = id_RC.to(tl.int64)
    if HAS_OFFSETS:
        id_RC += tl.load(offsets + id_RC, mask=ok_RC, other=0)
    if FINITE:
        id_RC = tl.where(tl.abs(key_value(top_RC)) < float("inf"), id_RC, -1)
    tl.store(ids + at_RC, id_RC, mask=ok_RC)
    if SOFTMAX:
        tl.store(logp + at_RC, logp_RC, mask=ok_RC)


def slice_size(rows: int, vocab: int, k: int) -> int:
    """How many tokens one program scans: for k = 1 so many that the programs fill the GPU, else as few as keep the merge small.

    Measured: benchmarks/rounds/README.md, "Why the tiles and rules are what they are".
    """
    if k == 1:
        return min(4096, max(256, triton.next_power_of_2(rows * vocab // PROGRAMS)))
    sizes = (2048, 4096, 8192, 16384)
    return next((size for size in sizes if triton.cdiv(vocab, size) * k <= MAX_KEYS), sizes[-1])


# Scans rows of logits: called with (logits, k, softmax), gives what `launch_scan` gives.
Scan = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]


def scan_slices(rows: int, vocab: int, k: int) -> int:
    """The number of slices in which a row is scanned."""
    return triton.cdiv(vocab, slice_size(rows, vocab, k))


def launch_scan(
    logits_RV: Tensor,
    k: int,
    softmax: bool,
    out: tuple[Tensor, Tensor] | None = None,
    noise: Noise | None = None,
    offsets_V: Tensor | None = None,
    size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(keys [R, S, k], sums [R, S]): the best tokens of each slice, and its sum of exponentials.  Rows may be strided.

    out: memory for the two results.  noise: what `gumbel.perturb` adds to the logits; offsets_V goes with it.
    size: tokens of a slice, if not as many as `slice_size` says.
    """
    R, V = logits_RV.shape
    assert 1 <= k <= V and logits_RV.stride(1) == 1
    size = size or slice_size(R, V, k)
    slices = triton.cdiv(V, size)
    if out is None:
        keys = torch.empty(R, slices, k, dtype=torch.int64, device=logits_RV.device)
        out = keys, torch.empty(R, slices, dtype=torch.float32, device=logits_RV.device)
    keys, sums = out
    if R:
        tensors, strides = ((keys, keys, keys), (0, 0)) if noise is None else noise_arguments(noise)
        ahead, each = (0, 1) if noise is None else (noise.ahead, R // noise.seed_B.shape[0])
        cutoff = None if noise is None or noise.filters is None else approximate_cutoffs(logits_RV, noise.filters)
        scan_kernel[(R, slices)](
            logits_RV, keys, sums, *tensors, keys if offsets_V is None else offsets_V, sums if cutoff is None else cutoff, V,
            logits_RV.stride(0), *strides, ahead, each, K=k, PADDED_K=triton.next_power_of_2(k), SLICE=size, SOFTMAX=softmax,
            LOGIT_WEIGHT=noise.logit_weight if noise else 1.0, NOISE_WEIGHT=noise.noise_weight if noise else 0.0,
            CUTOFF_WEIGHT=noise.cutoff_weight if noise and cutoff is not None else 0.0,
            HAS_OFFSETS=noise is not None and offsets_V is not None, ASM=logits_RV.is_cuda,
            num_warps=16 if size > 4096 else max(1, size // 1024), **chained(logits_RV.device),
        )  # fmt: skip
    return keys, sums


def noisy_scan(noise: Noise | None, offsets_V: Tensor | None) -> Scan:
    """`launch_scan` of logits to which the noise is added, if there is any."""
    return launch_scan if noise is None else partial(launch_scan, noise=noise, offsets_V=offsets_V)


def merge_sizes(slices: int, k: int) -> dict[str, int]:
    """The padded sizes of `merge_rows`."""
    power = triton.next_power_of_2
    return {"K": k, "PADDED_K": power(k), "PADDED_M": power(slices * k), "PADDED_S": power(slices)}


def launch_top_tokens(
    logits: Tensor, k: int, offsets_V: Tensor | None, out: tuple[Tensor, Tensor] | None, scan: Scan = launch_scan
) -> tuple[Tensor, Tensor]:
    """`topk.top_tokens`: (log-probabilities, ids)."""
    shape = (*logits.shape[:-1], k)
    if out is None:
        out = logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)
    logp, ids = out
    assert logp.shape == ids.shape == shape and logp.is_contiguous() and ids.is_contiguous()
    merge_scanned(scan(logits.reshape(-1, logits.shape[-1]), k, True), offsets_V, logp, ids)
    return logp, ids


def launch_best_logprobs(logits_RV: Tensor) -> Tensor:
    """`topk.best_logprobs`: [R, 1].  A program loads, and so adds up, 16-bit numbers in other portions than float32."""
    scan = partial(launch_scan, size=ORDERED_SLICE)
    return launch_top_tokens(logits_RV.float().contiguous(), 1, None, None, scan)[0]


def launch_greedy_tokens(logits: Tensor, offsets_V: Tensor | None, finite: bool = False, scan: Scan = launch_scan) -> Tensor:
    """`topk.greedy_tokens`: int64 ids."""
    ids = logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    merge_scanned(scan(logits.reshape(-1, logits.shape[-1]), 1, False), offsets_V, None, ids, finite)
    return ids


def merge_scanned(
    scanned: tuple[Tensor, Tensor], offsets_V: Tensor | None, logp: Tensor | None, ids: Tensor, finite: bool = False
) -> None:
    """Merges what a scan gave into ids, and into logp if given."""
    keys, sums = scanned
    rows, slices, k = keys.shape
    if rows:
        merge_kernel[(rows,)](
            keys, sums, ids if offsets_V is None else offsets_V, sums if logp is None else logp, ids, slices,
            **merge_sizes(slices, k), SOFTMAX=logp is not None, HAS_OFFSETS=offsets_V is not None, FINITE=finite,
            num_warps=1 if slices * k <= 256 else 4, **chained(ids.device),
        )  # fmt: skip
