"""The kernels of dense.py: a product with few rows, which streams the weight once, and activations for many rows.

With few rows, only the time to read the weight's bytes matters.  So a tile of the weight is the first operand of every product,
and x, padded to BLOCK_M rows, is the second.  This module knows no model's shapes and chooses no tiles.

The kernel hides the start and the end of a launch (see specdec/ops/launch.py).
- Start: no kernel writes weights, so each program prefetches the first PREFETCH elements of its rows into L2 before it waits
  for the kernel in front.
- End: each program lets the next kernel start when it is halfway through its rows, so that the next kernel's requests arrive
  while this kernel's slowest programs still run.

Shapes: M rows, K in, N out; a gated product has F = N, and its weight has 2F rows: gate rows first, then up rows.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.ops.products.tiles.dense import ProductTiles

PREFETCH = 512  # elements of each row; measured: prefetching more delays the requests that are needed first
ARRIVALS = 1024  # the most tiles of a split-K product


@triton.jit(do_not_specialize=["M"])  # M changes from call to call; Triton would compile again for 1 or a multiple of 16
def linear_kernel(
    x,  # [M, K]
    weight,  # [N, K], or [2 * N, K] if GATED
    bias,  # [N] or [2 * N]
    y,  # [M, N]
    partials,  # [tiles, SPLITS, BLOCK_N, BLOCK_M] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    M, N, K, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tl.arange(0, BLOCK_N)
    out_N, row_N = rows_of_tile(tile, N, BLOCK_N, GATED)
    ok_N, row_N = out_N < N, row_N.to(tl.int64)
    if not EVEN_N:
        row_N = tl.where(ok_N, row_N, 0)  # an out-of-range row reads row 0; its result is not stored
    per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    low = split * per_split
    high = tl.minimum(low + per_split, K)
    weight_N = weight + row_N * K
    if PDL:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
        ahead = low + tl.arange(0, PREFETCH // LINE) * LINE
        prefetch(weight_N[:, None] + ahead[None, :], (n >= 0)[:, None] & (ahead < high)[None, :])
        tl.extra.cuda.gdc_wait()

    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    ok_M = m < M
    x_M = x + m * stride_x
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    halfway = low + (high - low) // BLOCK_K // 2 * BLOCK_K
    for start in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        if PDL:
            if start == halfway:
                tl.extra.cuda.gdc_launch_dependents()
        at_K = start + k
        if EVEN_K:
            w_NK = tl.load(weight_N[:, None] + at_K[None, :])
            x_MK = tl.load(x_M[:, None] + at_K[None, :], mask=ok_M[:, None], other=0.0)
        else:
            ok_K = at_K < high
            w_NK = tl.load(weight_N[:, None] + at_K[None, :], mask=ok_K[None, :], other=0.0)
            x_MK = tl.load(x_M[:, None] + at_K[None, :], mask=ok_M[:, None] & ok_K[None, :], other=0.0)
        acc_NM = tl.dot(w_NK, tl.trans(x_MK), acc_NM, input_precision="ieee")

    complete(acc_NM, bias, y, partials, arrivals, tile, split, M, N, BLOCK_M, BLOCK_N, SPLITS, GATED, HAS_BIAS)


@triton.jit
def prefetch(at, ok):
    """Prefetches the 128 bytes around each address into L2, and returns at once."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [at, ok.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def rows_of_tile(tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """(where a tile's rows lie in the result, where in the weight).

    If gated, the tile's first half holds gate rows, its second half the up rows that belong to them.
    """
    n = tl.arange(0, BLOCK_N)
    if GATED:
        out_N = tile * (BLOCK_N // 2) + n % (BLOCK_N // 2)
        row_N = out_N + n // (BLOCK_N // 2) * N
    else:
        out_N = tile * BLOCK_N + n
        row_N = out_N
    return out_N, row_N


@triton.jit
def complete(
    acc_NM, bias, y, partials, arrivals, tile, split, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Stores the product.  With split-K the program of a tile that arrives last adds up all partials, in a fixed order."""
    if SPLITS == 1:
        store_product(acc_NM, bias, y, M, N, BLOCK_M, BLOCK_N, GATED, HAS_BIAS)
    else:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        cell_NM = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = partials + tile * (SPLITS * SIZE)
        tl.store(mine + split * SIZE + cell_NM, acc_NM)
        tl.debug_barrier()  # all of this program's stores before its arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + tile, 0)
            acc_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for s in tl.static_range(SPLITS):  # from L2 (.cg), since this SM's L1 may hold old data
                acc_NM += tl.load(mine + s * SIZE + cell_NM, cache_modifier=".cg")
            store_product(acc_NM, bias, y, M, N, BLOCK_M, BLOCK_N, GATED, HAS_BIAS)


@triton.jit
def store_product(
    acc_NM, bias, y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Adds the bias, applies SiLU-mul if gated, rounds once and stores."""
    m = tl.arange(0, BLOCK_M)
    y_M = y + m.to(tl.int64) * N
    out_N, row_N = rows_of_tile(tl.program_id(0), N, BLOCK_N, GATED)
    if HAS_BIAS:
        acc_NM += tl.load(bias + row_N, mask=out_N < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        out_F = tl.program_id(0) * HALF + tl.arange(0, HALF)
        gate_FM, up_FM = tl.split(tl.permute(tl.reshape(acc_NM, [2, HALF, BLOCK_M]), [1, 2, 0]))
        out_FM = gate_FM / (1 + tl.exp(-gate_FM)) * up_FM
        ok_FM = (out_F < N)[:, None] & (m < M)[None, :]
        tl.store(y_M[None, :] + out_F[:, None], out_FM.to(y.dtype.element_ty), mask=ok_FM)
    else:
        ok_NM = (out_N < N)[:, None] & (m < M)[None, :]
        tl.store(y_M[None, :] + out_N[:, None], acc_NM.to(y.dtype.element_ty), mask=ok_NM)


@triton.jit(do_not_specialize=["blocks"])
def activation_kernel(
    x,  # [M, 2 * F]: gate and up, if ACTIVATION is "swiglu" or "geglu", or [M, F]
    out,  # [M, F]
    stride, blocks, F,
    times,  # what gates are multiplied with
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) // blocks).to(tl.int64)
    f = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    ok = f < F
    first_F = tl.load(x + row * stride + f, mask=ok, other=0.0).to(tl.float32)
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
        up_F = tl.load(x + row * stride + F + f, mask=ok, other=0.0).to(tl.float32)
        gate_F = first_F * times
        inner_F = gate_F
        if ACTIVATION == "geglu":  # gelu by tanh is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x**3))
            inner_F = 1.5957691216057308 * (gate_F + 0.044715 * gate_F * gate_F * gate_F)
        out_F = gate_F / (1 + tl.exp(-inner_F)) * up_F
    else:
        out_F = relu2(first_F)
    tl.store(out + row * F + f, out_F.to(out.dtype.element_ty), mask=ok)


@triton.jit
def relu2(x):
    """The square of each number, or 0 where it is below 0.  What is not a number stays none, unlike a maximum's."""
    x = tl.where(x < 0, 0.0, x)
    return x * x


def launch_linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    """[M, N], or [M, F] if gated.  The rows of x may be strided; there are at most tiles.block_m of them.

    A split-K product counts its programs' arrivals in memory that all launches on a device share, so a device must run such
    products on one stream at a time.
    """
    (M, K), rows = x_MK.shape, weight_NK.shape[0]
    N = rows // 2 if gated else rows
    assert 0 < M <= tiles.block_m and weight_NK.shape[1] == K and weight_NK.is_contiguous() and x_MK.stride(1) == 1
    assert x_MK.dtype == weight_NK.dtype and (bias_N is None or bias_N.shape == (rows,))
    outs = tiles.block_n // 2 if gated else tiles.block_n
    num_tiles = triton.cdiv(N, outs)
    y_MN, partials, arrivals = result_of(x_MK, N, tiles.splits, num_tiles, tiles.block_n, tiles.block_m)
    linear_kernel[(num_tiles, tiles.splits)](
        x_MK, weight_NK, weight_NK if bias_N is None else bias_N, y_MN, partials, arrivals, M, N, K, x_MK.stride(0),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, SPLITS=tiles.splits, STAGES=tiles.stages,
        GATED=gated, HAS_BIAS=bias_N is not None, EVEN_N=N % outs == 0, EVEN_K=K % tiles.block_k == 0, PREFETCH=PREFETCH,
        num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_MK.device),
    )  # fmt: skip
    return y_MN


def launch_activation(x: Tensor, activation: Literal["swiglu", "geglu", "relu2"], times: float = 1.0) -> Tensor:
    """silu(times * gate) * up of [M, 2F], the same with gelu by tanh, or relu(x)^2 of [M, F]: [M, F]."""
    M, F = x.shape[0], x.shape[1] if activation == "relu2" else x.shape[1] // 2
    assert x.stride(1) == 1
    out_MF = x.new_empty(M, F)
    block = min(2048, triton.next_power_of_2(F))
    blocks = triton.cdiv(F, block)
    if M:
        activation_kernel[(M * blocks,)](
            x, out_MF, x.stride(0), blocks, F, times, ACTIVATION=activation, BLOCK=block, num_warps=8, **chained(out_MF.device)
        )
    return out_MF


def result_of(
    x_MK: Tensor, N: int, splits: int, num_tiles: int, block_n: int, block_m: int, store_partials: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(the result [M, N], or partials [splits, M, N] float32 with store_partials; a workspace for partials; arrival counters).

    All three are memory to be written.  Where programs add nothing up, the last two are never read.
    """
    if store_partials:
        y = x_MK.new_empty(splits, x_MK.shape[0], N, dtype=torch.float32)
        return y, y, y
    y = x_MK.new_empty(x_MK.shape[0], N)
    if splits == 1:
        return y, y, y
    assert num_tiles <= ARRIVALS
    partials = x_MK.new_empty(num_tiles, splits, block_n, block_m, dtype=torch.float32)
    return y, partials, arrivals_of(x_MK.device)


@cache
def arrivals_of(device: torch.device) -> Tensor:
    """A device's arrival counters.  The first call makes them, in a warm-up and not in a capture; each launch leaves them at
    zero.
    """
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
