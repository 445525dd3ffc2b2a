"""The kernel of hopper_launch.py for more rows of x than a few: four warps multiply together (wgmma).

The tensor cores take 96 or 192 rows of x, but tensors have powers of two, so a tile of x may have two parts.  Each number is
multiplied with both.

One or two such groups of warps multiply, and one warp of its own loads, so that a group never waits for the other, or for a
stage to be filled again.  Two groups take different rows of the weight, which halves the reads of x from L2, or take steps in
turn, and add their sums in shared memory.

A step has two halves: while one is multiplied, the codes of the next are converted.  A half has one scale a row.  Each half's
numbers have registers of their own, because a product that runs still reads its.  A wait for a product makes the compiler
convert codes after it, though the source converts them before.  So a step that has one scale waits once, at its end.

This module knows no model's shapes and chooses no tiles.

Shapes: as in hopper_launch.py.  B rows of the weight that a group takes, N rows of x.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait, next_stage, tma_load
from specdec.ops.products.kernels.quantised.lossless_hopper import bases_of_rows, far_products, far_rows, numbers_of_packed
from specdec.ops.products.kernels.quantised.parts_hopper import complete, numbers_of, of_groups, rows_of_groups, scales_of_rows


@gluon.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def quantised_hopper_kernel(
    x,  # [T, I]
    x_tiles,  # its tiles [ROWS, BLOCK_I]
    more_tiles,  # and [MORE, BLOCK_I]
    code_tiles,  # tiles [BLOCK_O / PARTS / 8, PARTS, 8, BLOCK_J] of the words as [O / 8, PARTS, 8, J]
    high_tiles,  # of packed weights, likewise with half as many words
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
    ROWS: gl.constexpr, MORE: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_I: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, TURNS: gl.constexpr, LOADER: gl.constexpr, OTHERS: gl.constexpr,
    PARTS: gl.constexpr, LEAVES: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """ROWS, MORE: of x in a tile, powers of two: the same numbers are multiplied with both.

    TILES: of the weight, of a program; BLOCK_O rows each.  TURNS: groups of warps that take a tile's steps in turn.

    LOADER, OTHERS: registers of a thread of the loading warp, and of the second group.  PARTS: 2 if gated, else 1.
    """
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    BLOCK_J: gl.constexpr = BLOCK_I // A_WORD
    of_t = gl.cdiv(T, ROWS + MORE)  # neighbouring programs read the same tiles of the weight
    tile = gl.program_id(0) // of_t * TILES
    first_t = gl.program_id(0) % of_t * (ROWS + MORE)
    counted = gl.program_id(0) * TILES
    split = gl.program_id(1)
    all_steps = gl.cdiv(I, BLOCK_I)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low

    shape: gl.constexpr = [STAGES * TILES, BLOCK_O // PARTS // 8, PARTS, 8, BLOCK_J]
    w_smem = gl.allocate_shared_memory(gl.int16, shape, code_tiles.layout)
    h_smem = w_smem  # what a kernel doesn't need is not read
    if KIND == "packed":
        half_shape: gl.constexpr = [STAGES * TILES, BLOCK_O // PARTS // 8, PARTS, 8, BLOCK_J // 2]
        h_smem = gl.allocate_shared_memory(gl.int16, half_shape, high_tiles.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK_I], x_tiles.layout)
    more_smem = x_smem
    if MORE > 0:
        more_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, MORE, BLOCK_I], more_tiles.layout)
    columns = x_smem, more_smem
    full_w = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full_w.index(s), count=1)
        mbarrier.init(full_x.index(s), count=1)
        mbarrier.init(empty.index(s), count=TILES)
    # What a kernel doesn't need has no barrier of its own: the compiler would give its memory to other data, while it is one.
    summed = empty
    sums = empty
    if TURNS > 1:
        summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(summed, count=1)
        sums = gl.allocate_shared_memory(gl.float32, [BLOCK_O, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    barrier()
    flat: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128 if BLOCK_J >= 64 else 2 * BLOCK_J, element_bitwidth=16, rank=2
    )
    w_tiles = w_smem._reinterpret(gl.int16, [STAGES * TILES, BLOCK_O, BLOCK_J], flat)
    h_tiles = w_tiles
    if KIND == "packed":
        narrow: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=128 if BLOCK_J >= 128 else BLOCK_J, element_bitwidth=16, rank=2
        )
        h_tiles = h_smem._reinterpret(gl.int16, [STAGES * TILES, BLOCK_O, BLOCK_J // 2], narrow)
    planes = scales, zeros, far_columns, far, most_far
    if TILES * TURNS == 1:
        gl.warp_specialize(
            [
                (multiply, (
                    x, columns, w_tiles, h_tiles, full_w, full_x, empty, sums, summed, planes, bias, y, partials, arrivals,
                    tile, counted, first_t, split, low, steps, T, O, I, G, stride_x, 0, KIND, GROUP, HAS_ZEROS, ROWS, MORE,
                    BLOCK_O, BLOCK_I, SPLITS, STAGES, TILES, TURNS, PARTS, LEAVES, HAS_BIAS, PDL,
                )),
                (load, (
                    x_tiles, more_tiles, code_tiles, high_tiles, columns, w_smem, h_smem, full_w, full_x, empty, tile, first_t,
                    low, steps, ROWS, MORE, BLOCK_O, BLOCK_I, BLOCK_J, STAGES, TILES, PARTS, KIND == "packed", PDL,
                )),
            ],
            [1], [LOADER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (
                    x, columns, w_tiles, h_tiles, full_w, full_x, empty, sums, summed, planes, bias, y, partials, arrivals,
                    tile, counted, first_t, split, low, steps, T, O, I, G, stride_x, 0, KIND, GROUP, HAS_ZEROS, ROWS, MORE,
                    BLOCK_O, BLOCK_I, SPLITS, STAGES, TILES, TURNS, PARTS, LEAVES, HAS_BIAS, PDL,
                )),
                (multiply, (
                    x, columns, w_tiles, h_tiles, full_w, full_x, empty, sums, summed, planes, bias, y, partials, arrivals,
                    tile, counted, first_t, split, low, steps, T, O, I, G, stride_x, 1, KIND, GROUP, HAS_ZEROS, ROWS, MORE,
                    BLOCK_O, BLOCK_I, SPLITS, STAGES, TILES, TURNS, PARTS, LEAVES, HAS_BIAS, PDL,
                )),
                (load, (
                    x_tiles, more_tiles, code_tiles, high_tiles, columns, w_smem, h_smem, full_w, full_x, empty, tile, first_t,
                    low, steps, ROWS, MORE, BLOCK_O, BLOCK_I, BLOCK_J, STAGES, TILES, PARTS, KIND == "packed", PDL,
                )),
            ],
            [4, 1], [OTHERS, LOADER],
        )  # fmt: skip


@gluon.jit
def load(
    x_tiles, more_tiles, code_tiles, high_tiles, columns, w_smem, h_smem, full_w, full_x, empty, tile, first_t, low, steps,
    ROWS: gl.constexpr, MORE: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, PACKED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: codes of all stages, then, once x exists, its columns; then each stage that was emptied."""
    for s in gl.static_range(STAGES):
        if s < steps:
            _load_codes(
                code_tiles, high_tiles, w_smem, h_smem, full_w, tile, low + s, s, BLOCK_O, BLOCK_J, TILES, PARTS, PACKED
            )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        if s < steps:
            _load_columns(x_tiles, more_tiles, columns, full_x, first_t, (low + s) * BLOCK_I, s, ROWS, MORE, BLOCK_I)
    slot = 0
    phase = 0
    for k in range(STAGES, steps):
        mbarrier.wait(empty.index(slot), phase)
        _load_codes(code_tiles, high_tiles, w_smem, h_smem, full_w, tile, low + k, slot, BLOCK_O, BLOCK_J, TILES, PARTS, PACKED)
        _load_columns(x_tiles, more_tiles, columns, full_x, first_t, (low + k) * BLOCK_I, slot, ROWS, MORE, BLOCK_I)
        slot, phase = next_stage(slot, phase, STAGES)


@gluon.jit
def _load_codes(
    code_tiles, high_tiles, w_smem, h_smem, full_w, tile, step, slot,
    BLOCK_O: gl.constexpr, BLOCK_J: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(full_w.index(slot), TILES * BLOCK_O * BLOCK_J * (3 if PACKED else 2))
    for n in gl.static_range(TILES):
        row = (tile + n) * (BLOCK_O // PARTS // 8)
        tma_load(code_tiles, [row, 0, 0, step * BLOCK_J], full_w.index(slot), w_smem.index(slot * TILES + n))
        if PACKED:
            tma_load(high_tiles, [row, 0, 0, step * (BLOCK_J // 2)], full_w.index(slot), h_smem.index(slot * TILES + n))


@gluon.jit
def _load_columns(
    x_tiles, more_tiles, columns, full_x, first_t, i, slot, ROWS: gl.constexpr, MORE: gl.constexpr, BLOCK_I: gl.constexpr
):  # fmt: skip
    mbarrier.expect(full_x.index(slot), (ROWS + MORE) * BLOCK_I * 2)
    tma_load(x_tiles, [first_t, i], full_x.index(slot), columns[0].index(slot))
    if MORE > 0:
        tma_load(more_tiles, [first_t + ROWS, i], full_x.index(slot), columns[1].index(slot))


@gluon.jit
def multiply(
    x, columns, w_tiles, h_tiles, full_w, full_x, empty, sums, summed, planes, bias, y, partials, arrivals,
    tile, counted, first_t, split, low, steps, T, O, I, G, stride_x,
    WHO: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr,
    ROWS: gl.constexpr, MORE: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_I: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, TURNS: gl.constexpr, PARTS: gl.constexpr, LEAVES: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Group WHO of four warps: its tile, or its steps of the only tile."""
    scales, zeros, far_columns, far, most_far = planes
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    HALF: gl.constexpr = BLOCK_I // 2
    MINE: gl.constexpr = WHO if TILES > 1 else 0
    FIRST: gl.constexpr = WHO if TURNS > 1 else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    WHOLE: gl.constexpr = GROUP == 0 and KIND != "packed"
    scale = scales_of_rows(scales, tile + MINE, O, WHOLE, BLOCK_O, PARTS, layout)
    scales_B = rows_of_groups(scales, tile + MINE, O, G, BLOCK_O, PARTS, gl.SliceLayout(1, layout))
    zeros_B = rows_of_groups(zeros, tile + MINE, O, G, BLOCK_O, PARTS, gl.SliceLayout(1, left))
    scale_low, scale_high = _of_halves(scales_B, (low + FIRST) * BLOCK_I, G, GROUP > 0, GROUP, HALF)
    zero_low, zero_high = _of_halves(zeros_B, (low + FIRST) * BLOCK_I, G, HAS_ZEROS, GROUP, HALF)
    acc = gl.zeros([BLOCK_O, ROWS], gl.float32, layout)
    more = 0  # the sums of a tile's second part, if it has one
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE if MORE > 0 else 8, 16])
    if MORE > 0:
        more = gl.zeros([BLOCK_O, MORE], gl.float32, narrow)
    base = 0
    if KIND == "packed":
        base = bases_of_rows(scales, tile + MINE, O, BLOCK_O, PARTS, gl.SliceLayout(1, left))
        share = split * TURNS + FIRST
        rows_of_far = far_rows(
            scales, zeros, far_columns, far, most_far, tile + MINE, share, O, SPLITS * TURNS, ROWS, BLOCK_O, PARTS, layout
        )
    mbarrier.wait(full_w.index(FIRST), 0)
    at = FIRST * TILES + MINE
    numbers = _half(w_tiles.index(at), h_tiles.index(at), 0, zero_low, base, KIND, HAS_ZEROS, HALF, A_WORD, layout)
    if KIND == "packed":
        if PDL:
            gdc_wait()
        acc = far_products(rows_of_far, x, stride_x, first_t, T, ROWS, layout)
    slot = FIRST
    phase = 0
    for k in range(FIRST, steps, TURNS):
        goes_on = k + TURNS < steps  # else the last step's codes are converted once more, for nothing
        next_i = (low + gl.where(goes_on, k + TURNS, k)) * BLOCK_I
        next_scale_low, next_scale_high = _of_halves(scales_B, next_i, G, GROUP > 0, GROUP, HALF)
        next_zero_low, next_zero_high = _of_halves(zeros_B, next_i, G, HAS_ZEROS, GROUP, HALF)
        mbarrier.wait(full_x.index(slot), phase)
        part, part_more = _begin(numbers, columns, slot, 0, acc, more, GROUP > 0, HALF, MORE, narrow)
        at = slot * TILES + MINE
        others = _half(w_tiles.index(at), h_tiles.index(at), 1, zero_high, base, KIND, HAS_ZEROS, HALF, A_WORD, layout)
        if GROUP % BLOCK_I == 0:  # the step has one scale: its second half is queued up before the first one is complete
            part, part_more = _begin(others, columns, slot, 1, part, part_more, False, HALF, MORE, narrow)
            part, part_more, numbers = _wait(1, part, part_more, numbers, MORE)
        else:  # both halves' sums at one time would need too many registers
            acc, more = _end(part, part_more, numbers, acc, more, scale_low, GROUP, MORE, narrow)
            part, part_more = _begin(others, columns, slot, 1, acc, more, True, HALF, MORE, narrow)
        wraps = slot + TURNS >= STAGES
        next_slot = gl.where(goes_on, gl.where(wraps, slot + TURNS - STAGES, slot + TURNS), slot)
        next_phase = gl.where(goes_on & wraps, phase ^ 1, phase)
        mbarrier.wait(full_w.index(next_slot), next_phase)
        at = next_slot * TILES + MINE
        numbers = _half(w_tiles.index(at), h_tiles.index(at), 0, next_zero_low, base, KIND, HAS_ZEROS, HALF, A_WORD, layout)
        acc, more = _end(part, part_more, others, acc, more, scale_high, GROUP, MORE, narrow)
        mbarrier.arrive(empty.index(slot), count=1)
        slot = next_slot
        phase = next_phase
        scale_low = next_scale_low
        scale_high = next_scale_high
        zero_high = next_zero_high

    if FIRST > 0:
        sums.store(acc)
        barrier()
        mbarrier.arrive(summed, count=1)
    else:
        if TURNS > 1:
            mbarrier.wait(summed, 0)
            acc += sums.load(layout)
        complete(
            acc, layout, scale, bias, y, partials, arrivals, tile + MINE, counted + MINE, first_t, split, T, O, WHOLE, ROWS,
            BLOCK_O, SPLITS, PARTS, LEAVES, HAS_BIAS, 4,
        )  # fmt: skip
        if MORE > 0:
            scale_more = gl.convert_layout(scale, gl.SliceLayout(1, narrow))
            complete(
                more, narrow, scale_more, bias, y, partials, arrivals, tile + MINE, counted + MINE, first_t + ROWS, split, T, O,
                WHOLE, MORE, BLOCK_O, SPLITS, PARTS, LEAVES, HAS_BIAS, 4,
            )  # fmt: skip


@gluon.jit
def _of_halves(rows_B, i, G, needed: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr):
    """Scales or zeros of a step's halves, which starts at column i, from global memory."""
    if needed:
        low = of_groups(rows_B, i // GROUP, G)
        high = of_groups(rows_B, (i + HALF) // GROUP, G) if HALF % GROUP == 0 else low
        return low, high
    else:
        return 0, 0


@gluon.jit
def _half(
    w, h, half: gl.constexpr, zero, base, KIND: gl.constexpr, HAS_ZEROS: gl.constexpr, HALF: gl.constexpr, A_WORD: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The numbers of a step's first or second half."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    codes = w.slice(half * (HALF // A_WORD), HALF // A_WORD, dim=1).load(left)
    if KIND == "packed":
        highs = h.slice(half * (HALF // 4), HALF // 4, dim=1).load(left)
        return numbers_of_packed(codes, highs, base[:, None], layout, HALF)
    else:
        return numbers_of(codes, zero, layout, KIND, HAS_ZEROS, HALF)


@gluon.jit
def _begin(
    numbers, columns, slot, half: gl.constexpr, acc, more, ANEW: gl.constexpr, HALF: gl.constexpr, MORE: gl.constexpr,
    narrow: gl.constexpr,
):  # fmt: skip
    """Starts the products of a half: added to acc and more, or anew."""
    part = _multiply(numbers, columns[0].index(slot), half, acc, ANEW, HALF)
    if MORE > 0:
        numbers = gl.convert_layout(numbers, gl.DotOperandLayout(0, narrow, 2), assert_trivial=True)
        return part, _multiply(numbers, columns[1].index(slot), half, more, ANEW, HALF)
    else:
        return part, more


@gluon.jit
def _multiply(numbers, x, half: gl.constexpr, acc, ANEW: gl.constexpr, HALF: gl.constexpr):
    columns = x.slice(half * HALF, HALF, dim=1).permute((1, 0))
    if ANEW:
        return warpgroup_mma(numbers, columns, gl.zeros_like(acc), is_async=True)
    else:
        return warpgroup_mma(numbers, columns, acc, is_async=True)


@gluon.jit
def _wait(halves: gl.constexpr, part, part_more, numbers, MORE: gl.constexpr):
    """Waits until the products of at most so many halves run.  The others' numbers must stay in their registers until then."""
    if MORE > 0:
        return warpgroup_mma_wait(2 * halves, deps=(part, part_more, numbers))
    else:
        part, numbers = warpgroup_mma_wait(halves, deps=(part, numbers))
        return part, part_more, numbers


@gluon.jit
def _end(
    part, part_more, numbers, acc, more, scale, GROUP: gl.constexpr, MORE: gl.constexpr, narrow: gl.constexpr
):  # fmt: skip
    """acc and more when these products are complete."""
    part, part_more, _ = _wait(0, part, part_more, numbers, MORE)
    if GROUP > 0:
        if MORE > 0:
            part_more = more + part_more * gl.convert_layout(scale, gl.SliceLayout(1, narrow), assert_trivial=True)[:, None]
        return acc + part * scale[:, None], part_more
    else:
        return part, part_more
