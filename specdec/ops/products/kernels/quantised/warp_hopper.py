"""The kernel of hopper_launch.py for up to 8 rows of x: each warp multiplies alone (mma).

Latency counts, so groups of warps may take different columns of a step, and one warp of its own loads: the others wait for each
other once a step, after its products, to say that a stage was read.

This module knows no model's shapes and chooses no tiles.

Shapes: as in hopper_launch.py.  S slices, B rows of a tile, N rows of x in the tensor cores' tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait, next_stage, tma_load
from specdec.ops.products.kernels.quantised.lossless_hopper import bases_of_rows, far_products, far_rows, numbers_of_packed
from specdec.ops.products.kernels.quantised.parts_hopper import (
    columns_of,
    complete,
    half_of,
    numbers_of,
    of_groups,
    piece_of,
    rows_of_groups,
    scales_of_rows,
    whole_row,
    words_of,
)


@gluon.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def quantised_sliced_kernel(
    x,  # [T, I]
    x_tiles,  # else tiles [A_WORD, SLICES, ROWS, 64] of x as [A_WORD, I / SLICE, T, 64]
    code_tiles,  # tiles [SLICES, BLOCK_O / PARTS / 8, PARTS, 8, 64] of the words as [J / 64, O / 8, PARTS, 8, 64]
    high_tiles,  # of packed weights, likewise with 32 words
    scales,  # [PARTS * O, G]; of packed weights bases_O
    zeros,  # as scales; of packed weights starts
    far_columns,  # of packed weights, [N]
    far,  # of packed weights, [N]
    most_far,  # of packed weights, [PARTS * O / 8]
    bias,  # [PARTS * O]
    y,  # [T, O]; with LEAVES [SPLITS, T, O] float32
    partials,  # [tiles, SPLITS, BLOCK_O, ROWS] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    T, O, I, G, stride_x,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_O: gl.constexpr, SLICES: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    STEPS: gl.constexpr, LOADER: gl.constexpr,
    PARTS: gl.constexpr, LEAVES: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """SLICES groups of warps take different columns of a step.

    STEPS: of a program, at most.  LOADER: registers of a thread of the loading warp.  PARTS: 2 if gated, else 1.
    """
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    BLOCK_I: gl.constexpr = SLICES * 64 * A_WORD
    ONE: gl.constexpr = ROWS == 1  # then the row lies in shared memory once, and all columns of the sums are its
    TIMES: gl.constexpr = (STEPS * BLOCK_I + 256 * num_warps - 1) // (256 * num_warps)
    tile = gl.program_id(0)
    split = gl.program_id(1)
    all_steps = gl.cdiv(I, BLOCK_I)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low

    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES, SLICES, BLOCK_O // PARTS // 8, PARTS, 8, 64], code_tiles.layout)
    full_w = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    h_smem = w_smem  # what a kernel doesn't need is not read
    if KIND == "packed":
        h_smem = gl.allocate_shared_memory(gl.int16, [STAGES, SLICES, BLOCK_O // PARTS // 8, PARTS, 8, 32], high_tiles.layout)
    full_x = full_w
    if ONE:
        x_smem = gl.allocate_shared_memory(gl.bfloat16, [TIMES, 256 * num_warps], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, A_WORD, SLICES, ROWS, 64], x_tiles.layout)
        full_x = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full_w.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
        if not ONE:
            mbarrier.init(full_x.index(s), count=1)
    barrier()
    twos: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    w_cubes = w_smem._reinterpret(gl.int32, [STAGES, SLICES, BLOCK_O, 32], twos)
    h_cubes = w_cubes
    if KIND == "packed":
        narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=3)
        h_cubes = h_smem._reinterpret(gl.int32, [STAGES, SLICES, BLOCK_O, 16], narrow)
    planes = scales, zeros, far_columns, far, most_far
    gl.warp_specialize(
        [
            (multiply, (
                x, x_smem, w_cubes, h_cubes, full_w, full_x, empty, planes, bias, y, partials, arrivals, tile, split, low,
                steps, T, O, I, G, stride_x, KIND, GROUP, HAS_ZEROS, ROWS, BLOCK_O, SLICES, SPLITS, STAGES, PARTS, LEAVES,
                HAS_BIAS, PDL, num_warps,
            )),
            (load, (
                x_tiles, code_tiles, high_tiles, x_smem, w_smem, h_smem, full_w, full_x, empty, tile, low, steps, A_WORD, ROWS,
                BLOCK_O, SLICES, STAGES, PARTS, KIND == "packed", PDL,
            )),
        ],
        [1], [LOADER],
    )  # fmt: skip


@gluon.jit
def load(
    x_tiles, code_tiles, high_tiles, x_smem, w_smem, h_smem, full_w, full_x, empty, tile, low, steps,
    A_WORD: gl.constexpr, ROWS: gl.constexpr, BLOCK_O: gl.constexpr, SLICES: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PACKED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: codes of all stages, then, once x exists, its columns; then each stage that was emptied.

    Columns of the only row are loaded by the warps that multiply.
    """
    for s in gl.static_range(STAGES):
        if s < steps:
            _load_codes(code_tiles, high_tiles, w_smem, h_smem, full_w, tile, low + s, s, BLOCK_O, SLICES, PARTS, PACKED)
    if ROWS > 1:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        for s in gl.static_range(STAGES):
            if s < steps:
                _load_columns(x_tiles, x_smem, full_x, low + s, s, A_WORD, ROWS, SLICES)
    slot = 0
    phase = 0
    for k in range(STAGES, steps):
        mbarrier.wait(empty.index(slot), phase)
        _load_codes(code_tiles, high_tiles, w_smem, h_smem, full_w, tile, low + k, slot, BLOCK_O, SLICES, PARTS, PACKED)
        if ROWS > 1:
            _load_columns(x_tiles, x_smem, full_x, low + k, slot, A_WORD, ROWS, SLICES)
        slot, phase = next_stage(slot, phase, STAGES)


@gluon.jit
def _load_codes(
    code_tiles, high_tiles, w_smem, h_smem, full_w, tile, step, slot, BLOCK_O: gl.constexpr, SLICES: gl.constexpr,
    PARTS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(full_w.index(slot), SLICES * BLOCK_O * (192 if PACKED else 128))
    tma_load(code_tiles, [step * SLICES, tile * (BLOCK_O // PARTS // 8), 0, 0, 0], full_w.index(slot), w_smem.index(slot))
    if PACKED:
        tma_load(high_tiles, [step * SLICES, tile * (BLOCK_O // PARTS // 8), 0, 0, 0], full_w.index(slot), h_smem.index(slot))


@gluon.jit
def _load_columns(x_tiles, x_smem, full_x, step, slot, A_WORD: gl.constexpr, ROWS: gl.constexpr, SLICES: gl.constexpr):
    mbarrier.expect(full_x.index(slot), A_WORD * SLICES * ROWS * 128)
    tma_load(x_tiles, [0, step * SLICES, 0, 0], full_x.index(slot), x_smem.index(slot))


@gluon.jit
def multiply(
    x, x_smem, w_cubes, h_cubes, full_w, full_x, empty, planes, bias, y, partials, arrivals,
    tile, split, low, steps, T, O, I, G, stride_x,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_O: gl.constexpr, SLICES: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    LEAVES: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """All other warps."""
    scales, zeros, far_columns, far, most_far = planes
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    SLICE: gl.constexpr = 64 * A_WORD  # columns of a slice of a step: as many as lie in a row of 128 bytes
    ONE: gl.constexpr = ROWS == 1
    N: gl.constexpr = 8 if ONE else ROWS
    RUN: gl.constexpr = SLICE if GROUP == 0 else GROUP  # columns that have one scale a row
    RUNS: gl.constexpr = SLICE // RUN  # such runs of a slice
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, WARPS // SLICES, 1], [1, 16, 8])
    out: gl.constexpr = gl.SliceLayout(0, layout)
    WHOLE: gl.constexpr = GROUP == 0 and KIND != "packed"
    row_scale = scales_of_rows(scales, tile, O, WHOLE, BLOCK_O, PARTS, out)
    pairs: gl.constexpr = gl.DotOperandLayout(0, layout, 1)  # of words, as what a loop carries is not packed again
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    other_acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    if KIND == "packed":
        base = bases_of_rows(scales, tile, O, BLOCK_O, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :, None]
        rows_of_far = far_rows(scales, zeros, far_columns, far, most_far, tile, split, O, SPLITS, N, BLOCK_O, PARTS, out)
    scale_at = _places(scales, low, tile, O, G, SLICES, RUNS, BLOCK_O, PARTS, gl.SliceLayout(2, layout))
    zero_at = _places(zeros, low, tile, O, G, SLICES, RUNS, BLOCK_O, PARTS, gl.SliceLayout(2, left))
    scale = _of_runs(scale_at, 0, G, GROUP > 0, RUNS, SLICES)
    zero = _of_runs(zero_at, 0, G, HAS_ZEROS, RUNS, SLICES)
    mbarrier.wait(full_w.index(0), 0)
    codes = w_cubes.index(0).load(pairs)
    highs = h_cubes.index(0).load(pairs) if KIND == "packed" else 0
    if ONE:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        x_places = whole_row(x, x_smem, low, I, A_WORD, SLICES, WARPS)
    else:
        if PDL and KIND == "packed":
            gdc_wait()
        cube: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
        x_places = x_smem._reinterpret(gl.bfloat16, [STAGES * A_WORD, SLICES, ROWS, 64], cube)
    if KIND == "packed":
        of_far = far_products(rows_of_far, x, stride_x, 0, T, N, out)
    slot = 0
    phase = 0
    for k in range(steps):
        at = gl.minimum(k + 1, steps - 1)
        next_scale = _of_runs(scale_at, at, G, GROUP > 0, RUNS, SLICES)
        next_zero = _of_runs(zero_at, at, G, HAS_ZEROS, RUNS, SLICES)
        if not ONE:
            mbarrier.wait(full_x.index(slot), phase)
        columns = columns_of(x_places, (k if ONE else slot) * A_WORD, A_WORD, SLICES, N, ONE, right)
        for n in gl.static_range(A_WORD):
            words = piece_of(codes, n, A_WORD, left)
            if KIND == "packed":
                numbers = numbers_of_packed(words, words_of(half_of(highs, n), left), base, layout, 64)
            else:
                numbers = numbers_of(words, zero[n * 64 // RUN], layout, KIND, HAS_ZEROS, 64)
            if GROUP > 0:  # short chains of products, which the tensor cores work at side by side
                part = mma_v2(numbers, columns[n], gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout))
                acc += part * scale[n * 64 // RUN][:, :, None]
            elif n % 2 == 0:
                acc = mma_v2(numbers, columns[n], acc)
            else:
                other_acc = mma_v2(numbers, columns[n], other_acc)
        # Not before: a barrier does not wait for loads from shared memory that were only begun, and the copy engine's writes
        # don't queue up with them.  What was multiplied has come.
        if k + STAGES < steps:
            mbarrier.arrive(empty.index(slot), count=1)
        goes_on = k + 1 < steps  # else the last step is read once more, for nothing
        wraps = slot + 1 == STAGES
        slot = gl.where(goes_on, gl.where(wraps, 0, slot + 1), slot)
        phase = gl.where(goes_on & wraps, phase ^ 1, phase)
        mbarrier.wait(full_w.index(slot), phase)
        codes = w_cubes.index(slot).load(pairs)
        highs = h_cubes.index(slot).load(pairs) if KIND == "packed" else 0
        scale = next_scale
        zero = next_zero

    total = gl.sum(acc + other_acc, axis=0)
    if KIND == "packed":
        total += of_far
    complete(
        total, out, row_scale, bias, y, partials, arrivals, tile, tile, 0, split, T, O, WHOLE, N, BLOCK_O, SPLITS, PARTS,
        LEAVES, HAS_BIAS, WARPS,
    )  # fmt: skip


@gluon.jit
def _places(
    plane, low, tile, O, G, SLICES: gl.constexpr, RUNS: gl.constexpr, BLOCK_O: gl.constexpr, PARTS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Where rows of scales or zeros begin, [1, B], and the first run of a program's slices, [S, 1]."""
    rows_B = rows_of_groups(plane, tile, O, G, BLOCK_O, PARTS, gl.SliceLayout(0, layout))
    return rows_B[None, :], ((low * SLICES + gl.arange(0, SLICES, gl.SliceLayout(1, layout))) * RUNS)[:, None]


@gluon.jit
def _of_runs(places, k, G, needed: gl.constexpr, RUNS: gl.constexpr, SLICES: gl.constexpr):
    """The scales or zeros of step k, [S, B] for each run of a slice."""
    if not needed:
        return (0,) * RUNS
    elif RUNS == 1:
        return (of_groups(places[0], places[1] + k * SLICES, G),)
    else:
        run = places[1] + k * (SLICES * RUNS)
        two = of_groups(places[0], run, G), of_groups(places[0], run + 1, G)
        if RUNS == 2:
            return two
        else:
            return two + (of_groups(places[0], run + 2, G), of_groups(places[0], run + 3, G))
