"""A product written in Gluon for Hopper GPUs, whose programs hold their first weight tiles before the product's input exists.

Kernels of a decode step are short, and between two of them memory would idle: the last programs of a product end, the next
kernel is told so, and only then would its first loads start.  No kernel writes weights.  So here a program fills all stages of
its pipeline with weights by the GPU's copy engine (TMA), and only then waits for the kernel in front (specdec/ops/launch.py).
Where two programs fit on an SM, one of the next product's starts as soon as one of this product's ends.

A tile of the weight is the first operand of the tensor cores, 64 rows for each group of four warps, and x is the second.  In a
gated product, 8 rows of the gate alternate with the 8 rows of up that belong to them, so that a thread holds both of a pair.

This module knows no model's shapes and chooses no tiles.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.
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
from specdec.ops.products.tiles.dense import two_parts

if TYPE_CHECKING:
    from specdec.ops.products.tiles.dense import ProductTiles

TOGETHER = 8  # tiles of x whose programs are neighbours, so that they read the same tiles of the weight from L2
EIGHT = 8  # rows of the gate that alternate with as many of up
LATE = 16  # threshold in rows of a tile of x: of more, the tensor cores are a step late, which keeps them busy


@gluon.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def hopper_linear_kernel(
    x_low,  # tiles [LOW, BLOCK_I] of x [T, I]
    x_high,  # tiles [HIGH, BLOCK_I]
    weight_tiles,  # tiles [GROUPS, PARTS, 8, BLOCK_I] of the weight as [O / 8, PARTS, 8, I]
    bias,  # [PARTS * O]
    y,  # [T, O]; with STORE_PARTIALS [SPLITS, T, O] float32
    partials,  # [tiles, SPLITS, BLOCK_O, ROWS] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    T, O, I,
    LOW: gl.constexpr, HIGH: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_I: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, LAG: gl.constexpr, MANY: gl.constexpr, TOGETHER: gl.constexpr,
    STORE_PARTIALS: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """PARTS: 2 if gated, else 1.  LAG: steps that the tensor cores may be behind the loads.  MANY: whether T > ROWS.

    STORE_PARTIALS: whether programs that share a tile leave their sums to another kernel, which adds them up.
    """
    dtype: gl.constexpr = weight_tiles.dtype
    GROUPS: gl.constexpr = BLOCK_O // PARTS // 8
    ROWS: gl.constexpr = LOW + HIGH
    BYTES: gl.constexpr = (BLOCK_O + ROWS) * BLOCK_I * 2  # of a stage
    split = gl.program_id(1)
    if MANY:  # programs that read the same tiles of the weight are neighbours
        of_o, of_t = gl.cdiv(O, GROUPS * 8), gl.cdiv(T, ROWS)
        group = gl.program_id(0) // (TOGETHER * of_o)
        members = gl.minimum(of_t - group * TOGETHER, TOGETHER)
        within = gl.program_id(0) % (TOGETHER * of_o)
        first_t = (group * TOGETHER + within % members) * ROWS
        tile = within // members
    else:
        first_t = 0
        tile = gl.program_id(0)
    all_steps = gl.cdiv(I, BLOCK_I)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low

    w_smem = gl.allocate_shared_memory(dtype, [STAGES, GROUPS, PARTS, 8, BLOCK_I], weight_tiles.layout)
    low_smem = gl.allocate_shared_memory(dtype, [STAGES, LOW, BLOCK_I], x_low.layout)
    if HIGH > 0:
        high_smem = gl.allocate_shared_memory(dtype, [STAGES, HIGH, BLOCK_I], x_high.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(STAGES):
        at = (low + s) * BLOCK_I
        mbarrier.expect(full.index(s), BYTES, pred=s < steps)
        tma_load(weight_tiles, [tile * GROUPS, 0, 0, at], full.index(s), w_smem.index(s), pred=s < steps)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        at = (low + s) * BLOCK_I
        tma_load(x_low, [first_t, at], full.index(s), low_smem.index(s), pred=s < steps)
        if HIGH > 0:
            tma_load(x_high, [first_t + LOW, at], full.index(s), high_smem.index(s), pred=s < steps)

    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    low_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, LOW, 16])
    acc = gl.zeros([BLOCK_O, LOW], gl.float32, low_layout)
    high_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, HIGH if HIGH > 0 else LOW, 16])
    if HIGH > 0:
        acc_high = gl.zeros([BLOCK_O, HIGH], gl.float32, high_layout)
    slot = 0
    phase = 0
    for k in range(steps):
        mbarrier.wait(full.index(slot), phase)
        w = w_smem.index(slot)._reinterpret(dtype, [BLOCK_O, BLOCK_I], flat)
        acc = warpgroup_mma(w, low_smem.index(slot).permute((1, 0)), acc, is_async=True)
        if HIGH > 0:
            acc_high = warpgroup_mma(w, high_smem.index(slot).permute((1, 0)), acc_high, is_async=True)
            acc_high = warpgroup_mma_wait(2 * LAG, deps=(acc_high,))
            acc = warpgroup_mma_wait(2 * LAG, deps=(acc,))
        else:
            acc = warpgroup_mma_wait(LAG, deps=(acc,))
        barrier()  # all warps have read the stage that is filled again
        free = slot - LAG
        if free < 0:
            free += STAGES
        more = (k >= LAG) & (k - LAG + STAGES < steps)
        at = (low + k - LAG + STAGES) * BLOCK_I
        mbarrier.expect(full.index(free), BYTES, pred=more)
        tma_load(weight_tiles, [tile * GROUPS, 0, 0, at], full.index(free), w_smem.index(free), pred=more)
        tma_load(x_low, [first_t, at], full.index(free), low_smem.index(free), pred=more)
        if HIGH > 0:
            tma_load(x_high, [first_t + LOW, at], full.index(free), high_smem.index(free), pred=more)
        slot, phase = next_stage(slot, phase, STAGES)
    if LAG > 0:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if HIGH > 0:
            acc_high = warpgroup_mma_wait(0, deps=(acc_high,))

    if STORE_PARTIALS:
        y += split.to(gl.int64) * T * O
    if SPLITS == 1 or STORE_PARTIALS:
        store_product(acc, low_layout, bias, y, tile, first_t, T, O, split == 0, LOW, BLOCK_O, PARTS, HAS_BIAS)
        if HIGH > 0:
            store_product(acc_high, high_layout, bias, y, tile, first_t + LOW, T, O, split == 0, HIGH, BLOCK_O, PARTS, HAS_BIAS)
    else:  # the program of this tile that arrives last sums all partial results, in a fixed order
        SIZE: gl.constexpr = BLOCK_O * ROWS
        mine = partials + tile.to(gl.int64) * (SPLITS * SIZE)
        gl.store(mine + split * SIZE + partial_cells(low_layout, 0, LOW, BLOCK_O, ROWS), acc)
        if HIGH > 0:
            gl.store(mine + split * SIZE + partial_cells(high_layout, LOW, HIGH, BLOCK_O, ROWS), acc_high)
        barrier()  # all of this program's stores before its arrival
        if gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            gl.store(arrivals + tile, 0)
            acc = _summed(mine, low_layout, 0, LOW, ROWS, BLOCK_O, SPLITS)
            store_product(acc, low_layout, bias, y, tile, 0, T, O, True, LOW, BLOCK_O, PARTS, HAS_BIAS)
            if HIGH > 0:
                acc_high = _summed(mine, high_layout, LOW, HIGH, ROWS, BLOCK_O, SPLITS)
                store_product(acc_high, high_layout, bias, y, tile, LOW, T, O, True, HIGH, BLOCK_O, PARTS, HAS_BIAS)


@gluon.jit
def partial_cells(layout: gl.constexpr, first_t: gl.constexpr, N: gl.constexpr, BLOCK_O: gl.constexpr, ROWS: gl.constexpr):
    """Where N rows of a partial result lie."""
    r = gl.arange(0, BLOCK_O, gl.SliceLayout(1, layout))
    t = first_t + gl.arange(0, N, gl.SliceLayout(0, layout))
    return r[:, None] * ROWS + t[None, :]


@gluon.jit
def _summed(
    mine, layout: gl.constexpr, first_t: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, BLOCK_O: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """The sum over splits.  Loads come from L2 (.cg), since this SM's L1 may hold old data."""
    acc = gl.zeros([BLOCK_O, N], gl.float32, layout)
    cell = partial_cells(layout, first_t, N, BLOCK_O, ROWS)
    if N <= 32:  # all loads at once
        for s in gl.static_range(SPLITS):
            acc += gl.load(mine + s * (BLOCK_O * ROWS) + cell, cache_modifier=".cg")
    else:  # all loads at once would need too many registers
        for s in range(SPLITS):
            acc += gl.load(mine + s * (BLOCK_O * ROWS) + cell, cache_modifier=".cg")
    return acc


@gluon.jit
def _pair(value, N: gl.constexpr, BLOCK_O: gl.constexpr):
    """The gate's rows and up's."""
    return gl.split(gl.permute(gl.reshape(value, [BLOCK_O // 16, 2, 8, N]), (0, 2, 3, 1)))


@gluon.jit
def store_product(
    acc, layout: gl.constexpr, bias, y, tile, first_t, T, O, has_bias,
    N: gl.constexpr, BLOCK_O: gl.constexpr, PARTS: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Adds the bias if has_bias, applies SiLU-mul if gated, rounds once and stores N rows of x from first_t on."""
    r = gl.arange(0, BLOCK_O, gl.SliceLayout(1, layout))
    t = first_t + gl.arange(0, N, gl.SliceLayout(0, layout))
    out_O = tile * (BLOCK_O // PARTS) + r // (8 * PARTS) * 8 + r % 8
    if HAS_BIAS:
        acc += gl.load(bias + r // 8 % PARTS * O + out_O, mask=(out_O < O) & has_bias, other=0.0).to(gl.float32)[:, None]
    at = out_O.to(gl.int64)[:, None] + t.to(gl.int64)[None, :] * O
    ok = ((out_O < O)[:, None] & (t < T)[None, :]).to(gl.int32)
    if PARTS == 2:
        gate, up = _pair(acc, N, BLOCK_O)
        acc = gate / (1 + gl.exp(-gate)) * up
        at, _ = _pair(at, N, BLOCK_O)
        ok, _ = _pair(ok, N, BLOCK_O)
    gl.store(y + at, acc.to(y.dtype.element_ty), mask=ok != 0)


def launch_hopper_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gated: bool, tiles: ProductTiles, store_partials: bool = False
) -> Tensor:
    """[T, O], or [T, F] if gated.  Rows of x and of the weight must start at multiples of 16 bytes, and O be one of 8.

    tiles.block_m is a power of two or the sum of two.  Split products are counted as by launch_linear.
    store_partials: the result is [splits, T, O] float32, what each split has computed.
    """
    (T, I), rows = x_TI.shape, weight_OI.shape[0]
    O, parts = (rows // 2, 2) if gated else (rows, 1)
    low, high = two_parts(tiles.block_m)
    assert T > 0 and weight_OI.shape[1] == I and weight_OI.is_contiguous() and x_TI.stride(1) == 1 and O % EIGHT == 0
    assert x_TI.dtype == weight_OI.dtype and x_TI.element_size() == 2 and (bias_O is None or bias_O.shape == (rows,))
    assert tiles.splits == 1 or T <= tiles.block_m
    num_tiles = triton.cdiv(rows, tiles.block_n)
    assert not (store_partials and gated)
    y_TO, partials, arrivals = result_of(x_TI, O, tiles.splits, num_tiles, tiles.block_n, tiles.block_m, store_partials)
    x_low, lag = rows_of(x_TI, low, tiles.block_k), 0 if tiles.block_m <= LATE else 1
    hopper_linear_kernel[(num_tiles * triton.cdiv(T, tiles.block_m), tiles.splits)](
        x_low, rows_of(x_TI, high, tiles.block_k) if high else x_low, groups_of(weight_OI, parts, tiles.block_n, tiles.block_k),
        weight_OI if bias_O is None else bias_O, y_TO, partials, arrivals, T, O, I,
        LOW=low, HIGH=high, BLOCK_O=tiles.block_n, BLOCK_I=tiles.block_k, SPLITS=tiles.splits, STAGES=tiles.stages,
        PARTS=parts, LAG=lag, MANY=T > tiles.block_m, TOGETHER=TOGETHER, STORE_PARTIALS=store_partials,
        HAS_BIAS=bias_O is not None, num_warps=tiles.warps, **chained(x_TI.device),
    )  # fmt: skip
    return y_TO


def rows_of(x_TI: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The copy engine's descriptor of tiles of x."""
    return TensorDescriptor(x_TI, list(x_TI.shape), [x_TI.stride(0), 1], [rows, columns], tma_layout(2))


def groups_of(weight_OI: Tensor, parts: int, rows: int, columns: int) -> TensorDescriptor:
    """The copy engine's descriptor of a weight's tiles, in which 8 rows of each part alternate; also of words of codes."""
    (whole, I), groups = weight_OI.shape, rows // parts // EIGHT
    O = whole // parts
    shape, strides = [O // EIGHT, parts, EIGHT, I], [EIGHT * I, O * I, I, 1]
    return TensorDescriptor(weight_OI, shape, strides, [groups, parts, EIGHT, columns], tma_layout(4, columns))
