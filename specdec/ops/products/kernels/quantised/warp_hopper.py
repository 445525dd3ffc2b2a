"""The kernel of hopper_launch.py for up to 8 rows of x: each warp multiplies alone (mma).

Latency counts, so groups of consumer warps may take different columns of a step (sliced K), and the producer is a warp of its
own: the consumers wait for each other once a step, after its products, to say that a stage was read.

This module knows no model's shapes and chooses no tiles.

Shapes: as in hopper_launch.py.  S slices, B rows of the weight in a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait, next_stage, tma_load
from specdec.ops.products.kernels.quantised.lossless_hopper import (
    bases_of_rows,
    convert_lossless,
    outlier_products,
    outliers_of_tile,
)
from specdec.ops.products.kernels.quantised.parts_hopper import (
    columns_of,
    complete,
    convert_words,
    half_of,
    of_groups,
    piece_of,
    rows_of_groups,
    scales_of_rows,
    whole_row,
    words_of,
)


@gluon.jit(do_not_specialize=["M"])  # for the reason given at linear_kernel
def quantised_warp_kernel(
    x,  # [M, K]
    x_tiles,  # else tiles [PACK_FACTOR, SLICES, BLOCK_M, 64] of x as [PACK_FACTOR, K / SLICE, M, 64]
    qweight_tiles,  # tiles [SLICES, BLOCK_N / PARTS / 8, PARTS, 8, 64] of the words as [J / 64, N / 8, PARTS, 8, 64]
    high_tiles,  # of lossless weights, likewise with 32 words
    scales,  # [PARTS * N, G]; of lossless weights bases_N
    zero_points,  # as scales; of lossless weights starts
    outlier_columns,  # of lossless weights, of all rows' outliers
    outliers,  # of lossless weights, of all rows' outliers
    max_outliers,  # of lossless weights, [PARTS * N / 8]
    bias,  # [PARTS * N]
    y,  # [M, N]; with STORE_PARTIALS [SPLITS, M, N] float32
    partials,  # [tiles, SPLITS, BLOCK_N, BLOCK_M] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    M, N, K, G, stride_x,
    KIND: gl.constexpr, GROUP_SIZE: gl.constexpr, HAS_ZERO_POINTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLICES: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    STEPS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    PARTS: gl.constexpr, STORE_PARTIALS: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """SLICES groups of consumer warps take different columns of a step.

    STEPS: of a program, at most.  PRODUCER_REGISTERS: of a thread of the producer warp.  PARTS: 2 if gated, else 1.
    """
    PACK_FACTOR: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    BLOCK_K: gl.constexpr = SLICES * 64 * PACK_FACTOR
    ONE: gl.constexpr = BLOCK_M == 1  # then the row lies in shared memory once, and all columns of the sums are its
    TIMES: gl.constexpr = (STEPS * BLOCK_K + 256 * num_warps - 1) // (256 * num_warps)
    tile = gl.program_id(0)
    split = gl.program_id(1)
    all_steps = gl.cdiv(K, BLOCK_K)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low

    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES, SLICES, BLOCK_N // PARTS // 8, PARTS, 8, 64], qweight_tiles.layout)
    full_w = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    h_smem = w_smem  # what a kernel doesn't need is not read
    if KIND == "lossless":
        h_smem = gl.allocate_shared_memory(gl.int16, [STAGES, SLICES, BLOCK_N // PARTS // 8, PARTS, 8, 32], high_tiles.layout)
    full_x = full_w
    if ONE:
        x_smem = gl.allocate_shared_memory(gl.bfloat16, [TIMES, 256 * num_warps], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PACK_FACTOR, SLICES, BLOCK_M, 64], x_tiles.layout)
        full_x = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full_w.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
        if not ONE:
            mbarrier.init(full_x.index(s), count=1)
    barrier()
    twos: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    w_cubes = w_smem._reinterpret(gl.int32, [STAGES, SLICES, BLOCK_N, 32], twos)
    h_cubes = w_cubes
    if KIND == "lossless":
        narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=3)
        h_cubes = h_smem._reinterpret(gl.int32, [STAGES, SLICES, BLOCK_N, 16], narrow)
    of_weight = scales, zero_points, outlier_columns, outliers, max_outliers
    gl.warp_specialize(
        [
            (consume, (
                x, x_smem, w_cubes, h_cubes, full_w, full_x, empty, of_weight, bias, y, partials, arrivals, tile, split, low,
                steps, M, N, K, G, stride_x, KIND, GROUP_SIZE, HAS_ZERO_POINTS, BLOCK_M, BLOCK_N, SLICES, SPLITS, STAGES, PARTS,
                STORE_PARTIALS, HAS_BIAS, PDL, num_warps,
            )),
            (produce, (
                x_tiles, qweight_tiles, high_tiles, x_smem, w_smem, h_smem, full_w, full_x, empty, tile, low, steps,
                PACK_FACTOR, BLOCK_M, BLOCK_N, SLICES, STAGES, PARTS, KIND == "lossless", PDL,
            )),
        ],
        [1], [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def produce(
    x_tiles, qweight_tiles, high_tiles, x_smem, w_smem, h_smem, full_w, full_x, empty, tile, low, steps,
    PACK_FACTOR: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLICES: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, LOSSLESS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp: it loads words of all stages, then, once x exists, its columns; then each stage that was emptied.

    Columns of the only row are loaded by the consumer warps.
    """
    for s in gl.static_range(STAGES):
        if s < steps:
            _load_qweight(qweight_tiles, high_tiles, w_smem, h_smem, full_w, tile, low + s, s, BLOCK_N, SLICES, PARTS, LOSSLESS)
    if BLOCK_M > 1:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        for s in gl.static_range(STAGES):
            if s < steps:
                _load_columns(x_tiles, x_smem, full_x, low + s, s, PACK_FACTOR, BLOCK_M, SLICES)
    stage = 0
    phase = 0
    for step in range(STAGES, steps):
        mbarrier.wait(empty.index(stage), phase)
        _load_qweight(
            qweight_tiles, high_tiles, w_smem, h_smem, full_w, tile, low + step, stage, BLOCK_N, SLICES, PARTS, LOSSLESS
        )
        if BLOCK_M > 1:
            _load_columns(x_tiles, x_smem, full_x, low + step, stage, PACK_FACTOR, BLOCK_M, SLICES)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _load_qweight(
    qweight_tiles, high_tiles, w_smem, h_smem, full_w, tile, step, stage, BLOCK_N: gl.constexpr, SLICES: gl.constexpr,
    PARTS: gl.constexpr, LOSSLESS: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(full_w.index(stage), SLICES * BLOCK_N * (192 if LOSSLESS else 128))
    tma_load(qweight_tiles, [step * SLICES, tile * (BLOCK_N // PARTS // 8), 0, 0, 0], full_w.index(stage), w_smem.index(stage))
    if LOSSLESS:
        tma_load(high_tiles, [step * SLICES, tile * (BLOCK_N // PARTS // 8), 0, 0, 0], full_w.index(stage), h_smem.index(stage))


@gluon.jit
def _load_columns(x_tiles, x_smem, full_x, step, stage, PACK_FACTOR: gl.constexpr, BLOCK_M: gl.constexpr, SLICES: gl.constexpr):
    mbarrier.expect(full_x.index(stage), PACK_FACTOR * SLICES * BLOCK_M * 128)
    tma_load(x_tiles, [0, step * SLICES, 0, 0], full_x.index(stage), x_smem.index(stage))


@gluon.jit
def consume(
    x, x_smem, w_cubes, h_cubes, full_w, full_x, empty, of_weight, bias, y, partials, arrivals,
    tile, split, low, steps, M, N, K, G, stride_x,
    KIND: gl.constexpr, GROUP_SIZE: gl.constexpr, HAS_ZERO_POINTS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, SLICES: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    STORE_PARTIALS: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer warps."""
    scales, zero_points, outlier_columns, outliers, max_outliers = of_weight
    PACK_FACTOR: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    SLICE: gl.constexpr = 64 * PACK_FACTOR  # columns of a slice of a step: as many as lie in a row of 128 bytes
    ONE: gl.constexpr = BLOCK_M == 1
    PADDED_M: gl.constexpr = 8 if ONE else BLOCK_M
    RUN: gl.constexpr = SLICE if GROUP_SIZE == 0 else GROUP_SIZE  # columns that have one scale a row
    RUNS: gl.constexpr = SLICE // RUN  # such runs of a slice
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, WARPS // SLICES, 1], [1, 16, 8])
    out: gl.constexpr = gl.SliceLayout(0, layout)
    WHOLE: gl.constexpr = GROUP_SIZE == 0 and KIND != "lossless"
    row_scale = scales_of_rows(scales, tile, N, WHOLE, BLOCK_N, PARTS, out)
    pairs: gl.constexpr = gl.DotOperandLayout(0, layout, 1)  # of words: a loop carries 32-bit values as they are
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    acc = gl.zeros([SLICES, BLOCK_N, PADDED_M], gl.float32, layout)
    other_acc = gl.zeros([SLICES, BLOCK_N, PADDED_M], gl.float32, layout)
    if KIND == "lossless":
        base = bases_of_rows(scales, tile, N, BLOCK_N, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :, None]
        tile_outliers = outliers_of_tile(
            scales, zero_points, outlier_columns, outliers, max_outliers, tile, split, N, SPLITS, PADDED_M, BLOCK_N, PARTS, out
        )  # fmt: skip
    scale_at = _places(scales, low, tile, N, G, SLICES, RUNS, BLOCK_N, PARTS, gl.SliceLayout(2, layout))
    zero_point_at = _places(zero_points, low, tile, N, G, SLICES, RUNS, BLOCK_N, PARTS, gl.SliceLayout(2, left))
    scale = _of_runs(scale_at, 0, G, GROUP_SIZE > 0, RUNS, SLICES)
    zero_point = _of_runs(zero_point_at, 0, G, HAS_ZERO_POINTS, RUNS, SLICES)
    mbarrier.wait(full_w.index(0), 0)
    qweight = w_cubes.index(0).load(pairs)
    highs = h_cubes.index(0).load(pairs) if KIND == "lossless" else 0
    if ONE:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        x_places = whole_row(x, x_smem, low, K, PACK_FACTOR, SLICES, WARPS)
    else:
        if PDL and KIND == "lossless":
            gdc_wait()
        cube: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
        x_places = x_smem._reinterpret(gl.bfloat16, [STAGES * PACK_FACTOR, SLICES, BLOCK_M, 64], cube)
    if KIND == "lossless":
        of_outliers = outlier_products(tile_outliers, x, stride_x, 0, M, PADDED_M, out)
    stage = 0
    phase = 0
    for step in range(steps):
        at = gl.minimum(step + 1, steps - 1)
        next_scale = _of_runs(scale_at, at, G, GROUP_SIZE > 0, RUNS, SLICES)
        next_zero_point = _of_runs(zero_point_at, at, G, HAS_ZERO_POINTS, RUNS, SLICES)
        if not ONE:
            mbarrier.wait(full_x.index(stage), phase)
        columns = columns_of(x_places, (step if ONE else stage) * PACK_FACTOR, PACK_FACTOR, SLICES, PADDED_M, ONE, right)
        for n in gl.static_range(PACK_FACTOR):
            words = piece_of(qweight, n, PACK_FACTOR, left)
            if KIND == "lossless":
                values = convert_lossless(words, words_of(half_of(highs, n), left), base, layout, 64)
            else:
                values = convert_words(words, zero_point[n * 64 // RUN], layout, KIND, HAS_ZERO_POINTS, 64)
            if GROUP_SIZE > 0:  # short chains of products, which the tensor cores work at side by side
                part = mma_v2(values, columns[n], gl.zeros([SLICES, BLOCK_N, PADDED_M], gl.float32, layout))
                acc += part * scale[n * 64 // RUN][:, :, None]
            elif n % 2 == 0:
                acc = mma_v2(values, columns[n], acc)
            else:
                other_acc = mma_v2(values, columns[n], other_acc)
        # The stage is not released before the products: an mbarrier does not wait for loads from shared memory that are still
        # on their way, and TMA's writes are not ordered after them.  What was multiplied has arrived in registers.
        if step + STAGES < steps:
            mbarrier.arrive(empty.index(stage), count=1)
        goes_on = step + 1 < steps  # else the last step is read once more, for nothing
        wraps = stage + 1 == STAGES
        stage = gl.where(goes_on, gl.where(wraps, 0, stage + 1), stage)
        phase = gl.where(goes_on & wraps, phase ^ 1, phase)
        mbarrier.wait(full_w.index(stage), phase)
        qweight = w_cubes.index(stage).load(pairs)
        highs = h_cubes.index(stage).load(pairs) if KIND == "lossless" else 0
        scale = next_scale
        zero_point = next_zero_point

    total = gl.sum(acc + other_acc, axis=0)
    if KIND == "lossless":
        total += of_outliers
    complete(
        total, out, row_scale, bias, y, partials, arrivals, tile, tile, 0, split, M, N, WHOLE, PADDED_M, BLOCK_N, SPLITS, PARTS,
        STORE_PARTIALS, HAS_BIAS, WARPS,
    )  # fmt: skip


@gluon.jit
def _places(
    tensor, low, tile, N, G, SLICES: gl.constexpr, RUNS: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Where rows of scales or zero points begin, [1, B], and the first run of a program's slices, [S, 1]."""
    rows_B = rows_of_groups(tensor, tile, N, G, BLOCK_N, PARTS, gl.SliceLayout(0, layout))
    return rows_B[None, :], ((low * SLICES + gl.arange(0, SLICES, gl.SliceLayout(1, layout))) * RUNS)[:, None]


@gluon.jit
def _of_runs(places, step, G, needed: gl.constexpr, RUNS: gl.constexpr, SLICES: gl.constexpr):
    """The scales or zero points of a step, [S, B] for each run of a slice."""
    if not needed:
        return (0,) * RUNS
    elif RUNS == 1:
        return (of_groups(places[0], places[1] + step * SLICES, G),)
    else:
        run = places[1] + step * (SLICES * RUNS)
        two = of_groups(places[0], run, G), of_groups(places[0], run + 1, G)
        if RUNS == 2:
            return two
        else:
            return two + (of_groups(places[0], run + 2, G), of_groups(places[0], run + 3, G))
