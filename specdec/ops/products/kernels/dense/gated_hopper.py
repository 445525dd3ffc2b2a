"""SiLU-mul of gate and up in one kernel for many rows, written in Gluon for Hopper GPUs, by groups of warps with a job each.

cuBLAS computes such a product as fast as the tensor cores can, but writes gate and up to memory, where another kernel reads
them again.  Here a tile of the weight holds as many rows of the gate as of up, so that a thread has both of a pair.  One group
of warps asks the GPU's copy engine (TMA) for tiles and runs ahead, also into the next tile of the result.  Two groups multiply,
each half of the rows of x, and neither waits for the other, so that one multiplies while the other writes its result.  There is
one program an SM, and it computes tile after tile.

The kernel is not chained (specdec/ops/launch.py).  Its programs would take the SMs' shared memory while the kernel in front
still runs, and prompts took longer (benchmarks/rounds/README.md, "On an H200").

This module knows no model's shapes and chooses no tiles.

Shapes: T rows, I in, O out; the weight has 2 * O rows: gate rows first, then up rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec.ops.hopper import barrier, next_stage, tma_layout, tma_load, tma_store
from specdec.ops.products.kernels.dense.stream_hopper import rows_of

if TYPE_CHECKING:
    from specdec.ops.products.tiles.dense import ProductTiles

GROUP = 64  # rows of x that one group of four warps multiplies, of which there are two
TOGETHER = 8  # tiles of x whose programs are neighbours, so that they read the same tiles of the weight from L2
REGISTERS, FETCHER_REGISTERS = 240, 24  # of a thread of a group that multiplies, and of the group that asks for tiles


@gluon.jit
def _place(tile, of_t, of_o, TOGETHER: gl.constexpr):
    """Where a tile lies: TOGETHER tiles of x with the same tile of the weight, then with the next one."""
    group = tile // (TOGETHER * of_o)
    members = gl.minimum(of_t - group * TOGETHER, TOGETHER)
    within = tile % (TOGETHER * of_o)
    return group * TOGETHER + within % members, within // members


@gluon.jit
def _before(slot, STAGES: gl.constexpr):
    """The stage of the step before.  A variable for it would hold the first slot for ever: names that hold one value
    before a loop hold one value in it, too.
    """
    return gl.where(slot == 0, STAGES, slot) - 1


@gluon.jit
def _load(
    x_tiles, w_tiles, x_smem, w_smem, full, empty, of_t, of_o, steps,
    OUTS: gl.constexpr, BLOCK_I: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """The job of the group that asks for tiles."""
    ROWS: gl.constexpr = x_smem.shape[1]
    BYTES: gl.constexpr = (ROWS + 2 * OUTS) * BLOCK_I * 2
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), of_t * of_o, gl.num_programs(0)):
        t, o = _place(tile, of_t, of_o, TOGETHER)
        for k in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), BYTES)
            tma_load(w_tiles, [0, o * OUTS, k * BLOCK_I], full.index(slot), w_smem.index(slot))
            tma_load(x_tiles, [t * ROWS, k * BLOCK_I], full.index(slot), x_smem.index(slot))
            slot, phase = next_stage(slot, phase, STAGES)


@gluon.jit
def _multiply(
    x_smem, w_smem, y_smem, y_tiles, full, empty, bias, of_t, of_o, O, steps,
    WHICH: gl.constexpr, GROUP: gl.constexpr, OUTS: gl.constexpr, BLOCK_I: gl.constexpr, STAGES: gl.constexpr,
    TOGETHER: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """The job of group WHICH of those that multiply.  The copy engine writes its result while it multiplies the next tile."""
    dtype: gl.constexpr = x_smem.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * OUTS, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    mine = y_smem.index(WHICH)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), of_t * of_o, gl.num_programs(0)):
        t, o = _place(tile, of_t, of_o, TOGETHER)
        acc = gl.zeros([GROUP, 2 * OUTS], gl.float32, layout)
        for k in range(steps):
            mbarrier.wait(full.index(slot), phase)
            x = x_smem.index(slot).slice(WHICH * GROUP, GROUP)
            w = w_smem.index(slot)._reinterpret(dtype, [2 * OUTS, BLOCK_I], flat)
            acc = warpgroup_mma(x, w.permute((1, 0)), acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # this group has read the step before, whose memory is filled again
            mbarrier.arrive(empty.index(_before(slot, STAGES)), count=1, pred=k > 0)
            slot, phase = next_stage(slot, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(_before(slot, STAGES)), count=1)
        gate, up = gl.split(gl.permute(gl.reshape(acc, [GROUP, 2, OUTS]), (0, 2, 1)))
        if HAS_BIAS:
            out_O = o * OUTS + gl.arange(0, OUTS, gl.SliceLayout(0, gate.type.layout))
            gate += gl.load(bias + out_O, mask=out_O < O, other=0.0).to(gl.float32)[None, :]
            up += gl.load(bias + O + out_O, mask=out_O < O, other=0.0).to(gl.float32)[None, :]
        out = (gate / (1 + gl.exp(-gate)) * up).to(dtype)
        tma.store_wait(0)
        barrier()  # the copy engine has read the tile before
        mine.store(out)
        fence_async_shared()
        barrier()
        tma_store(y_tiles, [(t * 2 + WHICH) * GROUP, o * OUTS], mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def gated_linear_kernel(
    x_tiles,  # tiles [2 * GROUP, BLOCK_I] of x [T, I]
    w_tiles,  # tiles [2, OUTS, BLOCK_I] of the weight as [2, O, I]
    y_tiles,  # tiles [GROUP, OUTS] of y [T, O]
    bias,  # [2 * O]
    T, O, I,
    GROUP: gl.constexpr, OUTS: gl.constexpr, BLOCK_I: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr,
    REGISTERS: gl.constexpr, FETCHER: gl.constexpr, HAS_BIAS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """REGISTERS, FETCHER: of a thread of a group that multiplies, and of the group that asks for tiles."""
    dtype: gl.constexpr = x_tiles.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, 2 * GROUP, BLOCK_I], x_tiles.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, 2, OUTS, BLOCK_I], w_tiles.layout)
    y_smem = gl.allocate_shared_memory(dtype, [2, GROUP, OUTS], y_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    of_t, of_o, steps = gl.cdiv(T, 2 * GROUP), gl.cdiv(O, OUTS), gl.cdiv(I, BLOCK_I)
    gl.warp_specialize(
        [
            (_multiply, (
                x_smem, w_smem, y_smem, y_tiles, full, empty, bias, of_t, of_o, O, steps,
                0, GROUP, OUTS, BLOCK_I, STAGES, TOGETHER, HAS_BIAS,
            )),
            (_multiply, (
                x_smem, w_smem, y_smem, y_tiles, full, empty, bias, of_t, of_o, O, steps,
                1, GROUP, OUTS, BLOCK_I, STAGES, TOGETHER, HAS_BIAS,
            )),
            (_load, (x_tiles, w_tiles, x_smem, w_smem, full, empty, of_t, of_o, steps, OUTS, BLOCK_I, STAGES, TOGETHER)),
        ],
        [4, 4],
        [REGISTERS, FETCHER],
    )  # fmt: skip


def launch_gated_hopper(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: ProductTiles, programs: int) -> Tensor:
    """[T, O].  Rows of x and of the weight must start at multiples of 16 bytes, and O be one of 8.

    programs: at most as many as the GPU has SMs.
    """
    (T, I), O, outs = x_TI.shape, weight_OI.shape[0] // 2, tiles.block_n // 2
    assert T > 0 and weight_OI.shape[1] == I and weight_OI.is_contiguous() and x_TI.stride(1) == 1 and O % 8 == 0
    assert x_TI.dtype == weight_OI.dtype and x_TI.element_size() == 2 and (bias_O is None or bias_O.shape == (2 * O,))
    assert tiles.block_m == 2 * GROUP and tiles.warps == 4
    y_TO = x_TI.new_empty(T, O)
    number = triton.cdiv(T, tiles.block_m) * triton.cdiv(O, outs)
    gated_linear_kernel[(min(programs, number),)](
        rows_of(x_TI, tiles.block_m, tiles.block_k),
        TensorDescriptor(weight_OI, [2, O, I], [O * I, I, 1], [2, outs, tiles.block_k], tma_layout(3)),
        rows_of(y_TO, GROUP, outs),
        weight_OI if bias_O is None else bias_O, T, O, I,
        GROUP=GROUP, OUTS=outs, BLOCK_I=tiles.block_k, STAGES=tiles.stages, TOGETHER=TOGETHER,
        REGISTERS=REGISTERS, FETCHER=FETCHER_REGISTERS, HAS_BIAS=bias_O is not None, num_warps=tiles.warps,
    )  # fmt: skip
    return y_TO
