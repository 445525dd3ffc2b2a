"""SiLU-mul of gate and up in one kernel for many rows, written in Gluon for Hopper GPUs: persistent and warp-specialised.

cuBLAS computes such a product as fast as the tensor cores can, but writes gate and up to memory, where another kernel reads
them again.  Here a tile of the weight holds as many rows of the gate as of up, so that a thread has both of a pair.  Producer
warps load tiles by TMA and run ahead of the consumers, also into the next tile of the result.  Two consumer warpgroups multiply
(wgmma), each half of the rows of x.  Neither waits for the other, so that one multiplies while the other writes its result.
The kernel is persistent: one program an SM computes tile after tile.

The kernel is not chained (specdec/ops/launch.py).  Its programs would take the SMs' shared memory while the kernel in front
still runs, and prompts took longer (benchmarks/rounds/README.md, "On an H200").

This module knows no model's shapes and chooses no tiles.

Shapes: M rows, K in, N out; the weight has 2 * N rows: gate rows first, then up rows.
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

WARPGROUP_M = 64  # rows of x that each of the two consumer warpgroups multiplies
GROUP_M = 8  # tiles of x whose programs are neighbours, so that they read the same tiles of the weight from L2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # of a thread of a consumer warp, and of a producer warp


@gluon.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Where a tile lies: GROUP_M tiles of x with the same tile of the weight, then with the next one."""
    group = tile // (GROUP_M * tiles_n)
    members = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + within % members, within // members


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """The stage of the step before.  It is computed, because Gluon takes two variables that are equal before a loop for one
    variable within it.
    """
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def _producer(
    x_tiles, w_tiles, x_smem, w_smem, full, empty, tiles_m, tiles_n, steps,
    HALF_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The producer warps: they load tiles of x and of the weight as stages become empty."""
    ROWS: gl.constexpr = x_smem.shape[1]
    BYTES: gl.constexpr = (ROWS + 2 * HALF_N) * BLOCK_K * 2
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            tma_load(w_tiles, [0, tile_n * HALF_N, step * BLOCK_K], full.index(stage), w_smem.index(stage))
            tma_load(x_tiles, [tile_m * ROWS, step * BLOCK_K], full.index(stage), x_smem.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _consumer(
    x_smem, w_smem, y_smem, y_tiles, full, empty, bias, tiles_m, tiles_n, N, steps,
    WHICH: gl.constexpr, WARPGROUP_M: gl.constexpr, HALF_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup WHICH.  TMA writes a tile of its result while it multiplies the next tile."""
    dtype: gl.constexpr = x_smem.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF_N, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    mine = y_smem.index(WHICH)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        acc = gl.zeros([WARPGROUP_M, 2 * HALF_N], gl.float32, layout)
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            x = x_smem.index(stage).slice(WHICH * WARPGROUP_M, WARPGROUP_M)
            w = w_smem.index(stage)._reinterpret(dtype, [2 * HALF_N, BLOCK_K], flat)
            acc = warpgroup_mma(x, w.permute((1, 0)), acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before has been read, so its stage may be filled again
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        gate, up = gl.split(gl.permute(gl.reshape(acc, [WARPGROUP_M, 2, HALF_N]), (0, 2, 1)))
        if HAS_BIAS:
            out_N = tile_n * HALF_N + gl.arange(0, HALF_N, gl.SliceLayout(0, gate.type.layout))
            gate += gl.load(bias + out_N, mask=out_N < N, other=0.0).to(gl.float32)[None, :]
            up += gl.load(bias + N + out_N, mask=out_N < N, other=0.0).to(gl.float32)[None, :]
        out = (gate / (1 + gl.exp(-gate)) * up).to(dtype)
        tma.store_wait(0)
        barrier()  # TMA has read the result's previous tile
        mine.store(out)
        fence_async_shared()
        barrier()
        tma_store(y_tiles, [(tile_m * 2 + WHICH) * WARPGROUP_M, tile_n * HALF_N], mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])  # for the reason given at linear_kernel
def gated_linear_kernel(
    x_tiles,  # tiles [2 * WARPGROUP_M, BLOCK_K] of x [M, K]
    w_tiles,  # tiles [2, HALF_N, BLOCK_K] of the weight as [2, N, K]
    y_tiles,  # tiles [WARPGROUP_M, HALF_N] of y [M, N]
    bias,  # [2 * N]
    M, N, K,
    WARPGROUP_M: gl.constexpr, HALF_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, HAS_BIAS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A stage has two mbarriers: `full` says that the producer has loaded it, `empty` that the consumers have read it."""
    dtype: gl.constexpr = x_tiles.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, 2 * WARPGROUP_M, BLOCK_K], x_tiles.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, 2, HALF_N, BLOCK_K], w_tiles.layout)
    y_smem = gl.allocate_shared_memory(dtype, [2, WARPGROUP_M, HALF_N], y_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    tiles_m, tiles_n, steps = gl.cdiv(M, 2 * WARPGROUP_M), gl.cdiv(N, HALF_N), gl.cdiv(K, BLOCK_K)
    gl.warp_specialize(
        [
            (_consumer, (
                x_smem, w_smem, y_smem, y_tiles, full, empty, bias, tiles_m, tiles_n, N, steps,
                0, WARPGROUP_M, HALF_N, BLOCK_K, STAGES, GROUP_M, HAS_BIAS,
            )),
            (_consumer, (
                x_smem, w_smem, y_smem, y_tiles, full, empty, bias, tiles_m, tiles_n, N, steps,
                1, WARPGROUP_M, HALF_N, BLOCK_K, STAGES, GROUP_M, HAS_BIAS,
            )),
            (_producer, (
                x_tiles, w_tiles, x_smem, w_smem, full, empty, tiles_m, tiles_n, steps, HALF_N, BLOCK_K, STAGES, GROUP_M,
            )),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def launch_gated_hopper(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tiles: ProductTiles, programs: int) -> Tensor:
    """[M, N].  Rows of x and of the weight must start at multiples of 16 bytes, and N must be a multiple of 8.

    programs: at most as many as the GPU has SMs.
    """
    (M, K), N, half_n = x_MK.shape, weight_NK.shape[0] // 2, tiles.block_n // 2
    assert M > 0 and weight_NK.shape[1] == K and weight_NK.is_contiguous() and x_MK.stride(1) == 1 and N % 8 == 0
    assert x_MK.dtype == weight_NK.dtype and x_MK.element_size() == 2 and (bias_N is None or bias_N.shape == (2 * N,))
    assert tiles.block_m == 2 * WARPGROUP_M and tiles.warps == 4
    y_MN = x_MK.new_empty(M, N)
    number = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, half_n)
    gated_linear_kernel[(min(programs, number),)](
        rows_of(x_MK, tiles.block_m, tiles.block_k),
        TensorDescriptor(weight_NK, [2, N, K], [N * K, K, 1], [2, half_n, tiles.block_k], tma_layout(3)),
        rows_of(y_MN, WARPGROUP_M, half_n),
        weight_NK if bias_N is None else bias_N, M, N, K,
        WARPGROUP_M=WARPGROUP_M, HALF_N=half_n, BLOCK_K=tiles.block_k, STAGES=tiles.stages, GROUP_M=GROUP_M,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, HAS_BIAS=bias_N is not None,
        num_warps=tiles.warps,
    )  # fmt: skip
    return y_MN
