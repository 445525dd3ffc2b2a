"""A product written in Gluon for Hopper GPUs, whose programs load their first weight tiles before the product's input exists.

Kernels of a decode step are short, and between two of them memory would idle: the last programs of a product end, the next
kernel is told so, and only then would its first loads start.  No kernel writes weights.  So here a program fills all stages of
its pipeline with weights by TMA, and only then waits for the kernel in front (specdec/ops/launch.py).  Where two programs fit
on an SM, one of the next product's starts as soon as one of this product's ends.

A tile of the weight is the first operand of wgmma, 64 rows for each warpgroup, and a tile of x is the second one.  In a gated
product, 8 rows of the gate alternate with the 8 rows of up that belong to them, so that a thread holds both of a pair.

This module knows no model's shapes and chooses no tiles.

Shapes: M rows, K in, N out; a gated product has F = N, and its weight has 2F rows: gate rows first, then up rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait, next_stage, tma_layout, tma_load
from specdec.ops.launch import chained
from specdec.ops.products.kernels.dense.stream_triton import result_of
from specdec.ops.products.tiles.dense import two_pieces

if TYPE_CHECKING:
    from specdec.ops.products.tiles.dense import ProductTiles

GROUP_M = 8  # tiles of x whose programs are neighbours, so that they read the same tiles of the weight from L2
INTERLEAVE = 8  # rows of the gate that alternate with as many of up
OVERLAP_ABOVE = 16  # threshold in rows of a tile of x: of more, a step's wgmma is in flight while the next one is issued


@gluon.jit(do_not_specialize=["M"])  # for the reason given at linear_kernel
def hopper_linear_kernel(
    x_low,  # tiles [LOW, BLOCK_K] of x [M, K]
    x_high,  # tiles [HIGH, BLOCK_K]
    weight_tiles,  # tiles [GROUPS, PARTS, 8, BLOCK_K] of the weight as [N / 8, PARTS, 8, K]
    bias,  # [PARTS * N]
    y,  # [M, N]; with STORE_PARTIALS [SPLITS, M, N] float32
    partials,  # [tiles, SPLITS, BLOCK_N, BLOCK_M] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    M, N, K,
    LOW: gl.constexpr, HIGH: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, IN_FLIGHT: gl.constexpr, MANY: gl.constexpr, GROUP_M: gl.constexpr,
    STORE_PARTIALS: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """BLOCK_M is LOW + HIGH.  PARTS: 2 if gated, else 1.  MANY: whether M > BLOCK_M.

    IN_FLIGHT: steps whose wgmma may be incomplete when the next step's is issued.
    STORE_PARTIALS: whether split-K partials are the result, which another kernel adds up.
    """
    dtype: gl.constexpr = weight_tiles.dtype
    GROUPS: gl.constexpr = BLOCK_N // PARTS // 8
    BLOCK_M: gl.constexpr = LOW + HIGH
    BYTES: gl.constexpr = (BLOCK_N + BLOCK_M) * BLOCK_K * 2  # of a stage
    split = gl.program_id(1)
    if MANY:  # programs that read the same tiles of the weight are neighbours
        tiles_n, tiles_m = gl.cdiv(N, GROUPS * 8), gl.cdiv(M, BLOCK_M)
        group = gl.program_id(0) // (GROUP_M * tiles_n)
        members = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        within = gl.program_id(0) % (GROUP_M * tiles_n)
        first_m = (group * GROUP_M + within % members) * BLOCK_M
        tile = within // members
    else:
        first_m = 0
        tile = gl.program_id(0)
    all_steps = gl.cdiv(K, BLOCK_K)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low

    w_smem = gl.allocate_shared_memory(dtype, [STAGES, GROUPS, PARTS, 8, BLOCK_K], weight_tiles.layout)
    low_smem = gl.allocate_shared_memory(dtype, [STAGES, LOW, BLOCK_K], x_low.layout)
    if HIGH > 0:
        high_smem = gl.allocate_shared_memory(dtype, [STAGES, HIGH, BLOCK_K], x_high.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())  # a stage is loaded
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(STAGES):
        at = (low + s) * BLOCK_K
        mbarrier.expect(full.index(s), BYTES, pred=s < steps)
        tma_load(weight_tiles, [tile * GROUPS, 0, 0, at], full.index(s), w_smem.index(s), pred=s < steps)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        at = (low + s) * BLOCK_K
        tma_load(x_low, [first_m, at], full.index(s), low_smem.index(s), pred=s < steps)
        if HIGH > 0:
            tma_load(x_high, [first_m + LOW, at], full.index(s), high_smem.index(s), pred=s < steps)

    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    low_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, LOW, 16])
    acc = gl.zeros([BLOCK_N, LOW], gl.float32, low_layout)
    high_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, HIGH if HIGH > 0 else LOW, 16])
    if HIGH > 0:
        acc_high = gl.zeros([BLOCK_N, HIGH], gl.float32, high_layout)
    stage = 0
    phase = 0
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        w = w_smem.index(stage)._reinterpret(dtype, [BLOCK_N, BLOCK_K], flat)
        acc = warpgroup_mma(w, low_smem.index(stage).permute((1, 0)), acc, is_async=True)
        if HIGH > 0:
            acc_high = warpgroup_mma(w, high_smem.index(stage).permute((1, 0)), acc_high, is_async=True)
            acc_high = warpgroup_mma_wait(2 * IN_FLIGHT, deps=(acc_high,))
            acc = warpgroup_mma_wait(2 * IN_FLIGHT, deps=(acc,))
        else:
            acc = warpgroup_mma_wait(IN_FLIGHT, deps=(acc,))
        barrier()  # all warps have read the stage that is filled again
        free = stage - IN_FLIGHT
        if free < 0:
            free += STAGES
        more = (step >= IN_FLIGHT) & (step - IN_FLIGHT + STAGES < steps)
        at = (low + step - IN_FLIGHT + STAGES) * BLOCK_K
        mbarrier.expect(full.index(free), BYTES, pred=more)
        tma_load(weight_tiles, [tile * GROUPS, 0, 0, at], full.index(free), w_smem.index(free), pred=more)
        tma_load(x_low, [first_m, at], full.index(free), low_smem.index(free), pred=more)
        if HIGH > 0:
            tma_load(x_high, [first_m + LOW, at], full.index(free), high_smem.index(free), pred=more)
        stage, phase = next_stage(stage, phase, STAGES)
    if IN_FLIGHT > 0:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if HIGH > 0:
            acc_high = warpgroup_mma_wait(0, deps=(acc_high,))

    if STORE_PARTIALS:
        y += split.to(gl.int64) * M * N
    if SPLITS == 1 or STORE_PARTIALS:
        store_product(acc, low_layout, bias, y, tile, first_m, M, N, split == 0, LOW, BLOCK_N, PARTS, HAS_BIAS)
        if HIGH > 0:
            store_product(acc_high, high_layout, bias, y, tile, first_m + LOW, M, N, split == 0, HIGH, BLOCK_N, PARTS, HAS_BIAS)
    else:  # the program of this tile that arrives last adds up all partials, in a fixed order
        SIZE: gl.constexpr = BLOCK_N * BLOCK_M
        mine = partials + tile.to(gl.int64) * (SPLITS * SIZE)
        gl.store(mine + split * SIZE + partial_cells(low_layout, 0, LOW, BLOCK_N, BLOCK_M), acc)
        if HIGH > 0:
            gl.store(mine + split * SIZE + partial_cells(high_layout, LOW, HIGH, BLOCK_N, BLOCK_M), acc_high)
        barrier()  # all of this program's stores before its arrival
        if gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            gl.store(arrivals + tile, 0)
            acc = _summed(mine, low_layout, 0, LOW, BLOCK_M, BLOCK_N, SPLITS)
            store_product(acc, low_layout, bias, y, tile, 0, M, N, True, LOW, BLOCK_N, PARTS, HAS_BIAS)
            if HIGH > 0:
                acc_high = _summed(mine, high_layout, LOW, HIGH, BLOCK_M, BLOCK_N, SPLITS)
                store_product(acc_high, high_layout, bias, y, tile, LOW, M, N, True, HIGH, BLOCK_N, PARTS, HAS_BIAS)


@gluon.jit
def partial_cells(
    layout: gl.constexpr, first_m: gl.constexpr, PIECE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Where the partials of PIECE rows of x lie."""
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    m = first_m + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    return n[:, None] * BLOCK_M + m[None, :]


@gluon.jit
def _summed(
    mine, layout: gl.constexpr, first_m: gl.constexpr, PIECE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """The sum over splits.  Loads come from L2 (.cg), since this SM's L1 may hold old data."""
    acc = gl.zeros([BLOCK_N, PIECE], gl.float32, layout)
    cell = partial_cells(layout, first_m, PIECE, BLOCK_N, BLOCK_M)
    if PIECE <= 32:  # all loads at once
        for s in gl.static_range(SPLITS):
            acc += gl.load(mine + s * (BLOCK_N * BLOCK_M) + cell, cache_modifier=".cg")
    else:  # all loads at once would need too many registers
        for s in range(SPLITS):
            acc += gl.load(mine + s * (BLOCK_N * BLOCK_M) + cell, cache_modifier=".cg")
    return acc


@gluon.jit
def _pair(value, PIECE: gl.constexpr, BLOCK_N: gl.constexpr):
    """The gate's rows and up's."""
    return gl.split(gl.permute(gl.reshape(value, [BLOCK_N // 16, 2, 8, PIECE]), (0, 2, 3, 1)))


@gluon.jit
def store_product(
    acc, layout: gl.constexpr, bias, y, tile, first_m, M, N, has_bias,
    PIECE: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Adds the bias if has_bias, applies SiLU-mul if gated, rounds once and stores PIECE rows of x from first_m on."""
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    m = first_m + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    out_N = tile * (BLOCK_N // PARTS) + n // (8 * PARTS) * 8 + n % 8
    if HAS_BIAS:
        acc += gl.load(bias + n // 8 % PARTS * N + out_N, mask=(out_N < N) & has_bias, other=0.0).to(gl.float32)[:, None]
    at = out_N.to(gl.int64)[:, None] + m.to(gl.int64)[None, :] * N
    ok = ((out_N < N)[:, None] & (m < M)[None, :]).to(gl.int32)
    if PARTS == 2:
        gate, up = _pair(acc, PIECE, BLOCK_N)
        acc = gate / (1 + gl.exp(-gate)) * up
        at, _ = _pair(at, PIECE, BLOCK_N)
        ok, _ = _pair(ok, PIECE, BLOCK_N)
    gl.store(y + at, acc.to(y.dtype.element_ty), mask=ok != 0)


def launch_hopper_linear(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, gated: bool, tiles: ProductTiles, store_partials: bool = False
) -> Tensor:
    """[M, N], or [M, F] if gated.  Rows of x and of the weight must start at multiples of 16 bytes, and N be a multiple of 8.

    tiles.block_m is a power of two or the sum of two.  Arrivals of split-K programs are counted as by launch_linear.
    store_partials: the result is [splits, M, N] float32, the partials.
    """
    (M, K), rows = x_MK.shape, weight_NK.shape[0]
    N, parts = (rows // 2, 2) if gated else (rows, 1)
    low, high = two_pieces(tiles.block_m)
    assert M > 0 and weight_NK.shape[1] == K and weight_NK.is_contiguous() and x_MK.stride(1) == 1 and N % INTERLEAVE == 0
    assert x_MK.dtype == weight_NK.dtype and x_MK.element_size() == 2 and (bias_N is None or bias_N.shape == (rows,))
    assert tiles.splits == 1 or M <= tiles.block_m
    num_tiles = triton.cdiv(rows, tiles.block_n)
    assert not (store_partials and gated)
    y_MN, partials, arrivals = result_of(x_MK, N, tiles.splits, num_tiles, tiles.block_n, tiles.block_m, store_partials)
    x_low, in_flight = rows_of(x_MK, low, tiles.block_k), 0 if tiles.block_m <= OVERLAP_ABOVE else 1
    hopper_linear_kernel[(num_tiles * triton.cdiv(M, tiles.block_m), tiles.splits)](
        x_low, rows_of(x_MK, high, tiles.block_k) if high else x_low, groups_of(weight_NK, parts, tiles.block_n, tiles.block_k),
        weight_NK if bias_N is None else bias_N, y_MN, partials, arrivals, M, N, K,
        LOW=low, HIGH=high, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, SPLITS=tiles.splits, STAGES=tiles.stages,
        PARTS=parts, IN_FLIGHT=in_flight, MANY=M > tiles.block_m, GROUP_M=GROUP_M, STORE_PARTIALS=store_partials,
        HAS_BIAS=bias_N is not None, num_warps=tiles.warps, **chained(x_MK.device),
    )  # fmt: skip
    return y_MN


def rows_of(x_MK: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The TMA descriptor of tiles of x."""
    return TensorDescriptor(x_MK, list(x_MK.shape), [x_MK.stride(0), 1], [rows, columns], tma_layout(2))


def groups_of(weight_NK: Tensor, parts: int, rows: int, columns: int) -> TensorDescriptor:
    """The TMA descriptor of a weight's tiles, in which 8 rows of each part alternate; also of words of quantised values."""
    (whole, K), groups = weight_NK.shape, rows // parts // INTERLEAVE
    N = whole // parts
    shape, strides = [N // INTERLEAVE, parts, INTERLEAVE, K], [INTERLEAVE * K, N * K, K, 1]
    return TensorDescriptor(weight_NK, shape, strides, [groups, parts, INTERLEAVE, columns], tma_layout(4, columns))
