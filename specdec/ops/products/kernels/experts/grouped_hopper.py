"""Products of experts with many rows each, written in Gluon for Hopper GPUs: persistent and warp-specialised.

The kernel is that of dense/gated_hopper.py, in which two consumer warpgroups multiply (wgmma) 64 rows of x each, and producer
warps load tiles by TMA and run ahead.  Here a tile of rows belongs to one expert, which a table names (by_expert_triton.py).
An expert's rows begin at a multiple of 64, so a warpgroup's rows are one expert's, and TMA may write all 64 of them: beyond the
expert's last row nobody reads.  A warpgroup without rows frees the stages and multiplies nothing.

A gated product's tile of the weight holds as many rows of the gate as of up, so that a thread has both of a pair.

The kernel is not chained (specdec/ops/launch.py), for the reason that gated_hopper.py gives.

Shapes: R rows of x, E experts, K in, N out; a gated product's matrices have 2 * N rows: gate rows first, then up rows.
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
from specdec.ops.products.kernels.dense.gated_hopper import stage_before, tile_of
from specdec.ops.products.kernels.dense.stream_hopper import rows_of
from specdec.ops.products.tiles.experts import GROUPED_ALIGN, GROUPED_TILE

if TYPE_CHECKING:
    from specdec.ops.products.experts import Activation
    from specdec.ops.products.tiles.experts import GroupedTiles

WARPGROUP_M = GROUPED_ALIGN  # rows of x that each of the two consumer warpgroups multiplies
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # of a thread of a consumer warp, and of a producer warp


@gluon.jit
def _producer(
    x_tiles, w_tiles, x_smem, w_smem, full, empty, table, tiles_n, steps,
    PARTS: gl.constexpr, OUT: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The producer warps: they load tiles of x and of the weight as stages become empty."""
    BYTES: gl.constexpr = (x_smem.shape[1] + PARTS * OUT) * BLOCK_K * 2
    stage = 0
    phase = 1
    tiles_m = gl.load(table)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        expert = gl.load(table + 4 * tile_m + 4)
        row = gl.load(table + 4 * tile_m + 5)
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            tma_load(w_tiles, [expert * PARTS, tile_n * OUT, step * BLOCK_K], full.index(stage), w_smem.index(stage))
            tma_load(x_tiles, [row, step * BLOCK_K], full.index(stage), x_smem.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _swiglu(acc, bias, out_N, N, OUT: gl.constexpr, HAS_BIAS: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    """[M, OUT]: the gates, a tile's first half, times the ups that belong to them: see SwiGLU (experts.py)."""
    gate, up = gl.split(gl.permute(gl.reshape(acc, [acc.shape[0], 2, OUT]), (0, 2, 1)))
    if HAS_BIAS:
        at = gl.convert_layout(out_N, gl.SliceLayout(0, gate.type.layout))
        ok = at < N
        gate += gl.load(bias + at, mask=ok, other=0.0).to(gl.float32)[None, :]
        up += gl.load(bias + N + at, mask=ok, other=0.0).to(gl.float32)[None, :]
    if LIMIT > 0:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT) + 1
    return gate / (1 + gl.exp(-ALPHA * gate)) * up


@gluon.jit
def _consumer(
    x_smem, w_smem, y_smem, y_tiles, full, empty, bias, table, tiles_n, N, steps,
    WHICH: gl.constexpr, WARPGROUP_M: gl.constexpr, PARTS: gl.constexpr, OUT: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup WHICH.  TMA writes a tile of its result while it multiplies the next tile."""
    dtype: gl.constexpr = x_smem.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PARTS * OUT, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    mine = y_smem.index(WHICH)
    stage = 0
    phase = 0
    tiles_m = gl.load(table)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        if gl.load(table + 4 * tile_m + 6) > WHICH * WARPGROUP_M:
            acc = gl.zeros([WARPGROUP_M, PARTS * OUT], gl.float32, layout)
            for step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                x = x_smem.index(stage).slice(WHICH * WARPGROUP_M, WARPGROUP_M)
                w = w_smem.index(stage)._reinterpret(dtype, [PARTS * OUT, BLOCK_K], flat)
                acc = warpgroup_mma(x, w.permute((1, 0)), acc, use_acc=step > 0, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before has been read, so its stage may be filled again
                mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
                stage, phase = next_stage(stage, phase, STAGES)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
            expert = gl.load(table + 4 * tile_m + 4)
            out_N = tile_n * OUT + gl.arange(0, OUT, gl.SliceLayout(0, layout))
            if PARTS == 2:
                out = _swiglu(acc, bias + expert * 2 * N, out_N, N, OUT, HAS_BIAS, ALPHA, LIMIT)
            else:
                out = acc
                if HAS_BIAS:
                    out += gl.load(bias + expert * N + out_N, mask=out_N < N, other=0.0).to(gl.float32)[None, :]
                if ACTIVATION == "relu2":  # of what is no number, none
                    out = gl.where(out < 0, 0.0, out)
                    out = out * out
            tma.store_wait(0)
            barrier()  # TMA has read the result's previous tile
            mine.store(out.to(dtype))
            fence_async_shared()
            barrier()
            row = gl.load(table + 4 * tile_m + 5)
            tma_store(y_tiles, [row + WHICH * WARPGROUP_M, tile_n * OUT], mine)
        else:
            for _ in range(steps):  # in turn, so that no stage is freed twice
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, STAGES)
    tma.store_wait(0)


@gluon.jit
def grouped_linear_kernel(
    x_tiles,  # tiles [2 * WARPGROUP_M, BLOCK_K] of x [R, K]
    w_tiles,  # tiles [PARTS, OUT, BLOCK_K] of the weights as [E * PARTS, N, K]
    y_tiles,  # tiles [WARPGROUP_M, OUT] of y [R, N]
    bias,  # [E, PARTS * N]
    table,  # [1 + tiles, 4] int32: see place_pairs_kernel
    N, K,
    WARPGROUP_M: gl.constexpr, PARTS: gl.constexpr, OUT: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """PARTS: 2 if gated, else 1.  A stage has two mbarriers, as in gated_linear_kernel."""
    dtype: gl.constexpr = x_tiles.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, 2 * WARPGROUP_M, BLOCK_K], x_tiles.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, PARTS, OUT, BLOCK_K], w_tiles.layout)
    y_smem = gl.allocate_shared_memory(dtype, [2, WARPGROUP_M, OUT], y_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    tiles_n, steps = gl.cdiv(N, OUT), gl.cdiv(K, BLOCK_K)
    gl.warp_specialize(
        [
            (_consumer, (
                x_smem, w_smem, y_smem, y_tiles, full, empty, bias, table, tiles_n, N, steps,
                0, WARPGROUP_M, PARTS, OUT, BLOCK_K, STAGES, GROUP_M, HAS_BIAS, ACTIVATION, ALPHA, LIMIT,
            )),
            (_consumer, (
                x_smem, w_smem, y_smem, y_tiles, full, empty, bias, table, tiles_n, N, steps,
                1, WARPGROUP_M, PARTS, OUT, BLOCK_K, STAGES, GROUP_M, HAS_BIAS, ACTIVATION, ALPHA, LIMIT,
            )),
            (_producer, (
                x_tiles, w_tiles, x_smem, w_smem, full, empty, table, tiles_n, steps, PARTS, OUT, BLOCK_K, STAGES, GROUP_M,
            )),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def launch_grouped_hopper(
    x_RK: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, table_R4: Tensor, activation: Activation | None,
    tiles: GroupedTiles, programs: int,
) -> Tensor:  # fmt: skip
    """[R, N].  Rows of x and of the matrices must start at multiples of 16 bytes, and N must be a multiple of 8.

    programs: at most as many as the GPU has SMs.
    """
    from specdec.ops.products.experts import GeGLU, epilogue, inputs_of

    assert not isinstance(activation, GeGLU), "grouped_tiles chooses a library"
    (R, K), (E, rows, _), parts = x_RK.shape, weight_ENK.shape, inputs_of(activation)
    N, out = rows // parts, tiles.block_n // parts
    assert weight_ENK.shape[2] == K and weight_ENK.is_contiguous() and x_RK.stride(1) == 1 and N % 8 == 0
    assert x_RK.dtype == weight_ENK.dtype and x_RK.element_size() == 2 and R % WARPGROUP_M == 0 and E * rows < 1 << 31
    assert bias_EN is None or (bias_EN.shape == (E, rows) and bias_EN.is_contiguous())
    y_RN = x_RK.new_empty(R, N)
    grouped_linear_kernel[(min(programs, (len(table_R4) - 1) * triton.cdiv(N, out)),)](
        rows_of(x_RK, GROUPED_TILE, tiles.block_k),
        TensorDescriptor(weight_ENK, [E * parts, N, K], [N * K, K, 1], [parts, out, tiles.block_k], tma_layout(3)),
        rows_of(y_RN, WARPGROUP_M, out), weight_ENK if bias_EN is None else bias_EN, table_R4, N, K,
        WARPGROUP_M=WARPGROUP_M, PARTS=parts, OUT=out, BLOCK_K=tiles.block_k, STAGES=tiles.stages, GROUP_M=tiles.group_m,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, HAS_BIAS=bias_EN is not None,
        **epilogue(activation), num_warps=4,
    )  # fmt: skip
    return y_RN
