"""The kernel of hopper_launch.py for 9 rows of x and more: the four warps of a warpgroup multiply together (wgmma).

The tensor cores take 96 or 192 rows of x, but Triton's tensors have powers of two, so a tile of x may have two pieces.  Each
value of the weight is multiplied with both.

One or two consumer warpgroups multiply, and a producer warp loads, so that a warpgroup never waits for the other, or for a
stage to be filled again.  Two warpgroups take different rows of the weight, which halves the reads of x from L2, or take steps
in turn, and add their sums in shared memory.

A step has two halves: while wgmma multiplies one, the words of the next are converted.  A half has one scale a row.  Each
half's values have registers of their own, because a wgmma that runs still reads the other half's.  Do not wait for a wgmma
between converting words and multiplying them: the compiler moves the conversion after the wait, and the two no longer overlap.
So a step that has one scale waits once, at its end.

This module knows no model's shapes and chooses no tiles.

Shapes: as in hopper_launch.py.  B rows of the weight that a warpgroup takes.  The two PARTS of a gated weight are its gate and
up rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait, next_stage, tma_load
from specdec.ops.products.kernels.quantised.lossless_hopper import (
    bases_of_rows,
    convert_lossless,
    outlier_products,
    outliers_of_tile,
)
from specdec.ops.products.kernels.quantised.parts_hopper import (
    complete,
    convert_words,
    of_groups,
    rows_of_groups,
    scales_of_rows,
)


@gluon.jit(do_not_specialize=["M"])  # for the reason given at linear_kernel
def quantised_warpgroup_kernel(
    x,  # [M, K]
    x_tiles,  # its tiles [BLOCK_M, BLOCK_K]
    more_tiles,  # and [MORE_M, BLOCK_K]
    qweight_tiles,  # tiles [BLOCK_N / PARTS / 8, PARTS, 8, BLOCK_J] of the words as [N / 8, PARTS, 8, J]
    high_tiles,  # of lossless weights, likewise with half as many words
    scales,  # [PARTS * N, G]; of lossless weights bases_N (this one and the next four: formats/lossless.py)
    zero_points,  # as scales; of lossless weights starts
    outlier_columns,  # of lossless weights columns_X
    outliers,  # of lossless weights outliers_X
    max_outliers,  # of lossless weights max_outliers_E, [PARTS * N / 8]
    bias,  # [PARTS * N]
    y,  # [M, N]; with STORE_PARTIALS [SPLITS, M, N] float32
    partials,  # [tiles, SPLITS, BLOCK_N, BLOCK_M] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    M, N, K, G, stride_x,
    KIND: gl.constexpr, GROUP_SIZE: gl.constexpr, HAS_ZERO_POINTS: gl.constexpr,
    BLOCK_M: gl.constexpr, MORE_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, TURNS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PARTS: gl.constexpr, STORE_PARTIALS: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BLOCK_M, MORE_M: rows of x in the two pieces of a tile, powers of two or 0: the same values are multiplied with both.

    TILES: of the weight, of a program; BLOCK_N rows each.  TURNS: warpgroups that take a tile's steps in turn.

    PRODUCER_REGISTERS, CONSUMER_REGISTERS: of a thread of the producer warp, and of the second consumer warpgroup.  PARTS: 2 if
    gated, else 1.
    """
    PACK_FACTOR: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    BLOCK_J: gl.constexpr = BLOCK_K // PACK_FACTOR
    tiles_m = gl.cdiv(M, BLOCK_M + MORE_M)  # neighbouring programs read the same tiles of the weight
    tile = gl.program_id(0) // tiles_m * TILES
    first_m = gl.program_id(0) % tiles_m * (BLOCK_M + MORE_M)
    counted = gl.program_id(0) * TILES
    split = gl.program_id(1)
    all_steps = gl.cdiv(K, BLOCK_K)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low

    shape: gl.constexpr = [STAGES * TILES, BLOCK_N // PARTS // 8, PARTS, 8, BLOCK_J]
    w_smem = gl.allocate_shared_memory(gl.int16, shape, qweight_tiles.layout)
    h_smem = w_smem  # what a kernel doesn't need is not read
    if KIND == "lossless":
        half_shape: gl.constexpr = [STAGES * TILES, BLOCK_N // PARTS // 8, PARTS, 8, BLOCK_J // 2]
        h_smem = gl.allocate_shared_memory(gl.int16, half_shape, high_tiles.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], x_tiles.layout)
    more_smem = x_smem
    if MORE_M > 0:
        more_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, MORE_M, BLOCK_K], more_tiles.layout)
    x_pieces = x_smem, more_smem
    full_w = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full_w.index(s), count=1)
        mbarrier.init(full_x.index(s), count=1)
        mbarrier.init(empty.index(s), count=TILES)
    summed = empty  # when unused, it aliases `empty`: the compiler would reuse the memory of an unused mbarrier
    sums = empty
    if TURNS > 1:
        summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(summed, count=1)
        sums = gl.allocate_shared_memory(gl.float32, [BLOCK_N, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    barrier()
    flat: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128 if BLOCK_J >= 64 else 2 * BLOCK_J, element_bitwidth=16, rank=2
    )
    w_tiles = w_smem._reinterpret(gl.int16, [STAGES * TILES, BLOCK_N, BLOCK_J], flat)
    h_tiles = w_tiles
    if KIND == "lossless":
        narrow: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=128 if BLOCK_J >= 128 else BLOCK_J, element_bitwidth=16, rank=2
        )
        h_tiles = h_smem._reinterpret(gl.int16, [STAGES * TILES, BLOCK_N, BLOCK_J // 2], narrow)
    of_weight = scales, zero_points, outlier_columns, outliers, max_outliers
    if TILES * TURNS == 1:
        gl.warp_specialize(
            [
                (consume, (
                    x, x_pieces, w_tiles, h_tiles, full_w, full_x, empty, sums, summed, of_weight, bias, y, partials, arrivals,
                    tile, counted, first_m, split, low, steps, M, N, K, G, stride_x, 0, KIND, GROUP_SIZE, HAS_ZERO_POINTS,
                    BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, SPLITS, STAGES, TILES, TURNS, PARTS, STORE_PARTIALS, HAS_BIAS, PDL,
                )),
                (produce, (
                    x_tiles, more_tiles, qweight_tiles, high_tiles, x_pieces, w_smem, h_smem, full_w, full_x, empty, tile,
                    first_m, low, steps, BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, BLOCK_J, STAGES, TILES, PARTS,
                    KIND == "lossless", PDL,
                )),
            ],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (
                    x, x_pieces, w_tiles, h_tiles, full_w, full_x, empty, sums, summed, of_weight, bias, y, partials, arrivals,
                    tile, counted, first_m, split, low, steps, M, N, K, G, stride_x, 0, KIND, GROUP_SIZE, HAS_ZERO_POINTS,
                    BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, SPLITS, STAGES, TILES, TURNS, PARTS, STORE_PARTIALS, HAS_BIAS, PDL,
                )),
                (consume, (
                    x, x_pieces, w_tiles, h_tiles, full_w, full_x, empty, sums, summed, of_weight, bias, y, partials, arrivals,
                    tile, counted, first_m, split, low, steps, M, N, K, G, stride_x, 1, KIND, GROUP_SIZE, HAS_ZERO_POINTS,
                    BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, SPLITS, STAGES, TILES, TURNS, PARTS, STORE_PARTIALS, HAS_BIAS, PDL,
                )),
                (produce, (
                    x_tiles, more_tiles, qweight_tiles, high_tiles, x_pieces, w_smem, h_smem, full_w, full_x, empty, tile,
                    first_m, low, steps, BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, BLOCK_J, STAGES, TILES, PARTS,
                    KIND == "lossless", PDL,
                )),
            ],
            [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def produce(
    x_tiles, more_tiles, qweight_tiles, high_tiles, x_pieces, w_smem, h_smem, full_w, full_x, empty, tile, first_m, low, steps,
    BLOCK_M: gl.constexpr, MORE_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_J: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, LOSSLESS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp: it loads words of all stages, then, once x exists, tiles of x; then each stage that was emptied."""
    for s in gl.static_range(STAGES):
        if s < steps:
            _load_qweight(
                qweight_tiles, high_tiles, w_smem, h_smem, full_w, tile, low + s, s, BLOCK_N, BLOCK_J, TILES, PARTS, LOSSLESS
            )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        if s < steps:
            _load_x(x_tiles, more_tiles, x_pieces, full_x, first_m, (low + s) * BLOCK_K, s, BLOCK_M, MORE_M, BLOCK_K)
    stage = 0
    phase = 0
    for step in range(STAGES, steps):
        mbarrier.wait(empty.index(stage), phase)
        _load_qweight(
            qweight_tiles, high_tiles, w_smem, h_smem, full_w, tile, low + step, stage, BLOCK_N, BLOCK_J, TILES, PARTS, LOSSLESS
        )
        _load_x(x_tiles, more_tiles, x_pieces, full_x, first_m, (low + step) * BLOCK_K, stage, BLOCK_M, MORE_M, BLOCK_K)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _load_qweight(
    qweight_tiles, high_tiles, w_smem, h_smem, full_w, tile, step, stage,
    BLOCK_N: gl.constexpr, BLOCK_J: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, LOSSLESS: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(full_w.index(stage), TILES * BLOCK_N * BLOCK_J * (3 if LOSSLESS else 2))
    for n in gl.static_range(TILES):
        row = (tile + n) * (BLOCK_N // PARTS // 8)
        tma_load(qweight_tiles, [row, 0, 0, step * BLOCK_J], full_w.index(stage), w_smem.index(stage * TILES + n))
        if LOSSLESS:
            tma_load(high_tiles, [row, 0, 0, step * (BLOCK_J // 2)], full_w.index(stage), h_smem.index(stage * TILES + n))


@gluon.jit
def _load_x(
    x_tiles, more_tiles, x_pieces, full_x, first_m, k, stage, BLOCK_M: gl.constexpr, MORE_M: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    mbarrier.expect(full_x.index(stage), (BLOCK_M + MORE_M) * BLOCK_K * 2)
    tma_load(x_tiles, [first_m, k], full_x.index(stage), x_pieces[0].index(stage))
    if MORE_M > 0:
        tma_load(more_tiles, [first_m + BLOCK_M, k], full_x.index(stage), x_pieces[1].index(stage))


@gluon.jit
def consume(
    x, x_pieces, w_tiles, h_tiles, full_w, full_x, empty, sums, summed, of_weight, bias, y, partials, arrivals,
    tile, counted, first_m, split, low, steps, M, N, K, G, stride_x,
    WARPGROUP: gl.constexpr, KIND: gl.constexpr, GROUP_SIZE: gl.constexpr, HAS_ZERO_POINTS: gl.constexpr,
    BLOCK_M: gl.constexpr, MORE_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, TURNS: gl.constexpr, PARTS: gl.constexpr, STORE_PARTIALS: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup WARPGROUP multiplies tile number OWN of the program: all steps, or every TURNS-th from FIRST_STEP on.

    acc, more: the complete sums of the tile's two pieces.  running, running_more: those that a wgmma still adds to.
    """
    scales, zero_points, outlier_columns, outliers, max_outliers = of_weight
    PACK_FACTOR: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    HALF: gl.constexpr = BLOCK_K // 2
    OWN: gl.constexpr = WARPGROUP if TILES > 1 else 0
    FIRST_STEP: gl.constexpr = WARPGROUP if TURNS > 1 else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    WHOLE: gl.constexpr = GROUP_SIZE == 0 and KIND != "lossless"
    scale = scales_of_rows(scales, tile + OWN, N, WHOLE, BLOCK_N, PARTS, layout)
    scales_B = rows_of_groups(scales, tile + OWN, N, G, BLOCK_N, PARTS, gl.SliceLayout(1, layout))
    zero_points_B = rows_of_groups(zero_points, tile + OWN, N, G, BLOCK_N, PARTS, gl.SliceLayout(1, left))
    scale_low, scale_high = _of_halves(scales_B, (low + FIRST_STEP) * BLOCK_K, G, GROUP_SIZE > 0, GROUP_SIZE, HALF)
    zero_point_low, zero_point_high = _of_halves(
        zero_points_B, (low + FIRST_STEP) * BLOCK_K, G, HAS_ZERO_POINTS, GROUP_SIZE, HALF
    )
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    more = 0
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE_M if MORE_M > 0 else 8, 16])
    if MORE_M > 0:
        more = gl.zeros([BLOCK_N, MORE_M], gl.float32, narrow)
    base = 0
    if KIND == "lossless":
        base = bases_of_rows(scales, tile + OWN, N, BLOCK_N, PARTS, gl.SliceLayout(1, left))
        share = split * TURNS + FIRST_STEP
        tile_outliers = outliers_of_tile(
            scales, zero_points, outlier_columns, outliers, max_outliers, tile + OWN, share, N, SPLITS * TURNS, BLOCK_M,
            BLOCK_N, PARTS, layout,
        )  # fmt: skip
    mbarrier.wait(full_w.index(FIRST_STEP), 0)
    at = FIRST_STEP * TILES + OWN
    values = _half(
        w_tiles.index(at), h_tiles.index(at), 0, zero_point_low, base, KIND, HAS_ZERO_POINTS, HALF, PACK_FACTOR, layout
    )
    if KIND == "lossless":
        if PDL:
            gdc_wait()
        acc = outlier_products(tile_outliers, x, stride_x, first_m, M, BLOCK_M, layout)
    stage = FIRST_STEP
    phase = 0
    for step in range(FIRST_STEP, steps, TURNS):
        goes_on = step + TURNS < steps  # else the last step's words are converted once more, for nothing
        next_k = (low + gl.where(goes_on, step + TURNS, step)) * BLOCK_K
        next_scale_low, next_scale_high = _of_halves(scales_B, next_k, G, GROUP_SIZE > 0, GROUP_SIZE, HALF)
        next_zero_point_low, next_zero_point_high = _of_halves(zero_points_B, next_k, G, HAS_ZERO_POINTS, GROUP_SIZE, HALF)
        mbarrier.wait(full_x.index(stage), phase)
        running, running_more = _begin(values, x_pieces, stage, 0, acc, more, GROUP_SIZE > 0, HALF, MORE_M, narrow)
        at = stage * TILES + OWN
        others = _half(
            w_tiles.index(at), h_tiles.index(at), 1, zero_point_high, base, KIND, HAS_ZERO_POINTS, HALF, PACK_FACTOR, layout
        )
        if GROUP_SIZE % BLOCK_K == 0:  # the step has one scale: its second half is queued up before the first one is complete
            running, running_more = _begin(others, x_pieces, stage, 1, running, running_more, False, HALF, MORE_M, narrow)
            running, running_more, values = _wait(1, running, running_more, values, MORE_M)
        else:  # both halves' sums at one time would need too many registers
            acc, more = _end(running, running_more, values, acc, more, scale_low, GROUP_SIZE, MORE_M, narrow)
            running, running_more = _begin(others, x_pieces, stage, 1, acc, more, True, HALF, MORE_M, narrow)
        wraps = stage + TURNS >= STAGES
        other_stage = gl.where(goes_on, gl.where(wraps, stage + TURNS - STAGES, stage + TURNS), stage)
        next_phase = gl.where(goes_on & wraps, phase ^ 1, phase)
        mbarrier.wait(full_w.index(other_stage), next_phase)
        at = other_stage * TILES + OWN
        values = _half(
            w_tiles.index(at), h_tiles.index(at), 0, next_zero_point_low, base, KIND, HAS_ZERO_POINTS, HALF, PACK_FACTOR, layout
        )
        acc, more = _end(running, running_more, others, acc, more, scale_high, GROUP_SIZE, MORE_M, narrow)
        mbarrier.arrive(empty.index(stage), count=1)
        stage = other_stage
        phase = next_phase
        scale_low = next_scale_low
        scale_high = next_scale_high
        zero_point_high = next_zero_point_high

    if FIRST_STEP > 0:
        sums.store(acc)
        barrier()
        mbarrier.arrive(summed, count=1)
    else:
        if TURNS > 1:
            mbarrier.wait(summed, 0)
            acc += sums.load(layout)
        complete(
            acc, layout, scale, bias, y, partials, arrivals, tile + OWN, counted + OWN, first_m, split, M, N, WHOLE, BLOCK_M,
            BLOCK_N, SPLITS, PARTS, STORE_PARTIALS, HAS_BIAS, 4,
        )  # fmt: skip
        if MORE_M > 0:
            scale_more = gl.convert_layout(scale, gl.SliceLayout(1, narrow))
            complete(
                more, narrow, scale_more, bias, y, partials, arrivals, tile + OWN, counted + OWN, first_m + BLOCK_M, split, M,
                N, WHOLE, MORE_M, BLOCK_N, SPLITS, PARTS, STORE_PARTIALS, HAS_BIAS, 4,
            )  # fmt: skip


@gluon.jit
def _of_halves(rows_B, k, G, needed: gl.constexpr, GROUP_SIZE: gl.constexpr, HALF: gl.constexpr):
    """Scales or zero points of a step's halves, which starts at column k, from global memory."""
    if needed:
        low = of_groups(rows_B, k // GROUP_SIZE, G)
        high = of_groups(rows_B, (k + HALF) // GROUP_SIZE, G) if HALF % GROUP_SIZE == 0 else low
        return low, high
    else:
        return 0, 0


@gluon.jit
def _half(
    w, h, half: gl.constexpr, zero_point, base, KIND: gl.constexpr, HAS_ZERO_POINTS: gl.constexpr, HALF: gl.constexpr,
    PACK_FACTOR: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The values of a step's first or second half."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    words = w.slice(half * (HALF // PACK_FACTOR), HALF // PACK_FACTOR, dim=1).load(left)
    if KIND == "lossless":
        highs = h.slice(half * (HALF // 4), HALF // 4, dim=1).load(left)
        return convert_lossless(words, highs, base[:, None], layout, HALF)
    else:
        return convert_words(words, zero_point, layout, KIND, HAS_ZERO_POINTS, HALF)


@gluon.jit
def _begin(
    values, x_pieces, stage, half: gl.constexpr, acc, more, FROM_ZERO: gl.constexpr, HALF: gl.constexpr, MORE_M: gl.constexpr,
    narrow: gl.constexpr,
):  # fmt: skip
    """Starts the products of a half: added to acc and more, or, if FROM_ZERO, to zeros."""
    running = _multiply(values, x_pieces[0].index(stage), half, acc, FROM_ZERO, HALF)
    if MORE_M > 0:
        values = gl.convert_layout(values, gl.DotOperandLayout(0, narrow, 2), assert_trivial=True)
        return running, _multiply(values, x_pieces[1].index(stage), half, more, FROM_ZERO, HALF)
    else:
        return running, more


@gluon.jit
def _multiply(values, x, half: gl.constexpr, acc, FROM_ZERO: gl.constexpr, HALF: gl.constexpr):
    x_KM = x.slice(half * HALF, HALF, dim=1).permute((1, 0))
    if FROM_ZERO:
        return warpgroup_mma(values, x_KM, gl.zeros_like(acc), is_async=True)
    else:
        return warpgroup_mma(values, x_KM, acc, is_async=True)


@gluon.jit
def _wait(halves: gl.constexpr, running, running_more, values, MORE_M: gl.constexpr):
    """Waits until the products of at most so many halves run.  The others' values must stay in their registers until then."""
    if MORE_M > 0:
        return warpgroup_mma_wait(2 * halves, deps=(running, running_more, values))
    else:
        running, values = warpgroup_mma_wait(halves, deps=(running, values))
        return running, running_more, values


@gluon.jit
def _end(
    running, running_more, values, acc, more, scale, GROUP_SIZE: gl.constexpr, MORE_M: gl.constexpr, narrow: gl.constexpr
):  # fmt: skip
    """acc and more when these products are complete."""
    running, running_more, _ = _wait(0, running, running_more, values, MORE_M)
    if GROUP_SIZE > 0:
        if MORE_M > 0:
            scale_more = gl.convert_layout(scale, gl.SliceLayout(1, narrow), assert_trivial=True)
            running_more = more + running_more * scale_more[:, None]
        return acc + running * scale[:, None], running_more
    else:
        return running, running_more
