"""The product of few rows with a weight of 8 or 4 bits, written in Gluon for Hopper GPUs.

It is ops/products/linear_hopper.py's kernel, whose docstring explains the order of loads and waits, over codes instead of
numbers: the copy engine (TMA) fills all stages with codes before the product's input exists.  Codes go from shared memory to
registers, are converted there to bfloat16, in which every code is exact, and are the first operand of the tensor cores.  Scales
multiply float32 sums.  So nothing is rounded before the end.

- A scale for each row is applied once, to the complete sum.
- Scales for groups of columns, and zeros, lie in shared memory before the wait too, since no kernel writes them.  A group's sum
  is multiplied by its scale.

Up to 16 rows each warp multiplies alone: latency counts, and warps may take different columns of a step.  From 17 on four warps
multiply together.  This module knows no model's shapes and chooses no tiles.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.  J words of a
row of codes, G groups of a row.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec.ops.launch import chained
from specdec.ops.products.linear_hopper import (
    EIGHT,
    _barrier,
    _fetch,
    _let_the_next_kernel_start,
    _wait_for_the_kernel_in_front,
)
from specdec.ops.products.linear_triton import ARRIVALS, arrivals_of
from specdec.ops.quantised.codes import codes_a_word
from specdec.ops.quantised.parts_hopper import columns_of, complete, keep, numbers_of, piece_of, scales_of_rows, whole_row
from specdec.ops.quantised.tiles import CHUNK, kept_groups

if TYPE_CHECKING:
    from specdec.ops.quantised.codes import Codes
    from specdec.ops.quantised.tiles import HopperTiles


@gluon.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def quantised_hopper_kernel(
    x_tiles,  # tiles [ROWS, BLOCK_I] of x [T, I]
    code_tiles,  # tiles [BLOCK_O / PARTS / 8, PARTS, 8, BLOCK_J] of the words as [O / 8, PARTS, 8, J]
    scales,  # [PARTS * O, G]
    zeros,  # as scales
    bias,  # [PARTS * O]
    y,  # [T, O]
    partials,  # [tiles, SPLITS, BLOCK_O, ROWS] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    T, O, I, G,
    KIND: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, HAS_ZEROS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_I: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, CHUNK: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Four warps multiply together.  A step has two halves: while one is multiplied, the codes of the next are converted.

    A half has one scale a row.  The two halves' numbers lie in registers of their own: products that run still read theirs.

    GROUPS: whose scales a program keeps, at most.  PARTS: 2 if gated, else 1.
    """
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    BLOCK_J: gl.constexpr = BLOCK_I // A_WORD
    BYTES: gl.constexpr = (BLOCK_O * BLOCK_J + ROWS * BLOCK_I) * 2  # of a stage
    HALF: gl.constexpr = BLOCK_I // 2
    MORE: gl.constexpr = HALF // GROUP if GROUP > 0 else 0  # groups from a step's first half to its second
    of_t = gl.cdiv(T, ROWS)  # neighbouring programs read the same tile of the weight
    tile = gl.program_id(0) // of_t
    first_t = gl.program_id(0) % of_t * ROWS
    split = gl.program_id(1)
    all_steps = gl.cdiv(I, BLOCK_I)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low

    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_O // PARTS // 8, PARTS, 8, BLOCK_J], code_tiles.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK_I], x_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):  # stage by stage, so that the first request leaves early
        mbarrier.init(full.index(s), count=1)
        mbarrier.expect(full.index(s), BYTES, pred=s < steps)
        at = [tile * (BLOCK_O // PARTS // 8), 0, 0, (low + s) * BLOCK_J]
        _fetch(code_tiles, at, full.index(s), w_smem.index(s), pred=s < steps)

    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first_group = low * BLOCK_I // GROUP if GROUP > 0 else 0
    if GROUP > 0:
        scale_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], row)
        keep(scales, scale_smem, first_group, tile, O, G, GROUPS, BLOCK_O, PARTS, 1, 1, CHUNK, num_warps)
    else:
        scale_smem = full  # not read
    if HAS_ZEROS:
        zero_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], row)
        keep(zeros, zero_smem, first_group, tile, O, G, GROUPS, BLOCK_O, PARTS, 1, 1, CHUNK, num_warps)
    else:
        zero_smem = full  # not read
    if GROUP > 0 or HAS_ZEROS:
        _barrier()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    scale = scales_of_rows(scales, tile, O, GROUP, BLOCK_O, PARTS, layout)
    if PDL:
        _wait_for_the_kernel_in_front()
        _let_the_next_kernel_start()
    for s in gl.static_range(STAGES):
        _fetch(x_tiles, [first_t, (low + s) * BLOCK_I], full.index(s), x_smem.index(s), pred=s < steps)

    flat: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128 if BLOCK_J >= 64 else 2 * BLOCK_J, element_bitwidth=16, rank=2
    )
    w_tiles = w_smem._reinterpret(gl.int16, [STAGES, BLOCK_O, BLOCK_J], flat)
    acc = gl.zeros([BLOCK_O, ROWS], gl.float32, layout)
    mbarrier.wait(full.index(0), 0)
    numbers = _half(w_tiles.index(0), 0, zero_smem, 0, KIND, HAS_ZEROS, HALF, A_WORD, BLOCK_O, layout)
    slot = 0
    phase = 0
    for k in range(steps):
        group = (low + k) * BLOCK_I // GROUP - first_group if GROUP > 0 else 0
        x = x_smem.index(slot)
        part = _begin(numbers, x, 0, acc, GROUP, HALF)
        others = _half(w_tiles.index(slot), 1, zero_smem, group + MORE, KIND, HAS_ZEROS, HALF, A_WORD, BLOCK_O, layout)
        acc = _end(part, numbers, acc, scale_smem, group, GROUP, layout)
        part = _begin(others, x, 1, acc, GROUP, HALF)
        more = k + 1 < steps  # else the last step's codes are converted once more, for nothing
        wraps = slot + 1 == STAGES
        next_slot = gl.where(more, gl.where(wraps, 0, slot + 1), slot)
        next_phase = gl.where(more & wraps, phase ^ 1, phase)
        mbarrier.wait(full.index(next_slot), next_phase)
        next_group = (low + gl.minimum(k + 1, steps - 1)) * BLOCK_I // GROUP - first_group if GROUP > 0 else 0
        numbers = _half(w_tiles.index(next_slot), 0, zero_smem, next_group, KIND, HAS_ZEROS, HALF, A_WORD, BLOCK_O, layout)
        acc = _end(part, others, acc, scale_smem, group + MORE, GROUP, layout)
        _barrier()  # all warps have read the stage that is filled again
        more = k + STAGES < steps
        mbarrier.expect(full.index(slot), BYTES, pred=more)
        at = [tile * (BLOCK_O // PARTS // 8), 0, 0, (low + k + STAGES) * BLOCK_J]
        _fetch(code_tiles, at, full.index(slot), w_smem.index(slot), pred=more)
        _fetch(x_tiles, [first_t, (low + k + STAGES) * BLOCK_I], full.index(slot), x_smem.index(slot), pred=more)
        slot = next_slot
        phase = next_phase

    complete(
        acc, layout, scale, bias, y, partials, arrivals, tile, first_t, split, T, O, GROUP, ROWS, BLOCK_O, SPLITS, PARTS,
        HAS_BIAS, num_warps,
    )  # fmt: skip


@gluon.jit
def _half(
    w, half: gl.constexpr, zero_smem, group, KIND: gl.constexpr, HAS_ZEROS: gl.constexpr, HALF: gl.constexpr,
    A_WORD: gl.constexpr, BLOCK_O: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The numbers of a step's first or second half."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    zero = gl.zeros([BLOCK_O], gl.float32, gl.SliceLayout(1, left))
    if HAS_ZEROS:
        zero = zero_smem.index(group).load(gl.SliceLayout(1, left))
    codes = w.slice(half * (HALF // A_WORD), HALF // A_WORD, dim=1).load(left)
    return numbers_of(codes, zero, layout, KIND, HAS_ZEROS, HALF)


@gluon.jit
def _begin(numbers, x, half: gl.constexpr, acc, GROUP: gl.constexpr, HALF: gl.constexpr):
    """Starts the products of a half: added to acc, or by themselves where groups have scales."""
    columns = x.slice(half * HALF, HALF, dim=1).permute((1, 0))
    if GROUP > 0:
        return warpgroup_mma(numbers, columns, gl.zeros_like(acc), is_async=True)
    else:
        return warpgroup_mma(numbers, columns, acc, is_async=True)


@gluon.jit
def _end(part, numbers, acc, scale_smem, group, GROUP: gl.constexpr, layout: gl.constexpr):
    """acc when these products are complete.  Until then their numbers must stay in their registers."""
    part, _ = warpgroup_mma_wait(0, deps=(part, numbers))
    if GROUP > 0:
        return acc + part * scale_smem.index(group).load(gl.SliceLayout(1, layout))[:, None]
    else:
        return part


@gluon.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def quantised_sliced_kernel(
    x,  # [1, I] if ROWS is 1
    x_tiles,  # else tiles [A_WORD, SLICES, ROWS, 64] of x as [A_WORD, I / SLICE, T, 64]
    code_tiles,  # tiles [SLICES, BLOCK_O / PARTS / 8, PARTS, 8, 64] of the words as [J / 64, O / 8, PARTS, 8, 64]
    scales,  # [PARTS * O, G]
    zeros,  # as scales
    bias,  # [PARTS * O]
    y,  # [T, O]
    partials,  # [tiles, SPLITS, BLOCK_O, ROWS] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    T, O, I, G,
    KIND: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, HAS_ZEROS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_O: gl.constexpr, SLICES: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, CHUNK: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Each warp multiplies alone, and SLICES groups of warps take different columns of a step.

    STEPS: of a program, at most.  GROUPS: whose scales a program keeps, at most.  PARTS: 2 if gated, else 1.
    """
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    SLICE: gl.constexpr = 64 * A_WORD  # columns of a slice of a step: as many as lie in a row of 128 bytes
    BLOCK_I: gl.constexpr = SLICES * SLICE
    ONE: gl.constexpr = ROWS == 1  # then the row lies in shared memory once, and all columns of the sums are its
    N: gl.constexpr = 8 if ONE else ROWS
    BYTES: gl.constexpr = SLICES * BLOCK_O * 128 + (0 if ONE else ROWS * BLOCK_I * 2)  # of a stage
    RUN: gl.constexpr = SLICE if GROUP == 0 else GROUP  # columns that have one scale a row
    HELD: gl.constexpr = SLICE // RUN  # such runs of a slice
    tile = gl.program_id(0)
    split = gl.program_id(1)
    all_steps = gl.cdiv(I, BLOCK_I)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low
    first_o = tile * (BLOCK_O // PARTS // 8)

    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES, SLICES, BLOCK_O // PARTS // 8, PARTS, 8, 64], code_tiles.layout)
    if not ONE:
        x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, A_WORD, SLICES, ROWS, 64], x_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):  # stage by stage, so that the first request leaves early
        mbarrier.init(full.index(s), count=1)
        mbarrier.expect(full.index(s), BYTES, pred=s < steps)
        _fetch(code_tiles, [(low + s) * SLICES, first_o, 0, 0, 0], full.index(s), w_smem.index(s), pred=s < steps)

    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, num_warps // SLICES, 1], [1, 16, 8])
    pair: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if GROUP > 0:
        scale_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], pair)
        keep(scales, scale_smem, low * BLOCK_I // RUN, tile, O, G, GROUPS, BLOCK_O, PARTS, SLICES, HELD, CHUNK, num_warps)
        scale_smem = scale_smem._reinterpret(gl.float32, [GROUPS // SLICES, SLICES, BLOCK_O], pair)
    if HAS_ZEROS:
        zero_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], pair)
        keep(zeros, zero_smem, low * BLOCK_I // RUN, tile, O, G, GROUPS, BLOCK_O, PARTS, SLICES, HELD, CHUNK, num_warps)
        zero_smem = zero_smem._reinterpret(gl.float32, [GROUPS // SLICES, SLICES, BLOCK_O], pair)
    if GROUP > 0 or HAS_ZEROS:
        _barrier()
    out: gl.constexpr = gl.SliceLayout(0, layout)
    row_scale = scales_of_rows(scales, tile, O, GROUP, BLOCK_O, PARTS, out)
    if PDL:
        _wait_for_the_kernel_in_front()
        _let_the_next_kernel_start()
    cube: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    if ONE:
        x_places = whole_row(x, low, I, A_WORD, SLICES, STEPS, num_warps)
    else:
        for s in gl.static_range(STAGES):
            _fetch(x_tiles, [0, (low + s) * SLICES, 0, 0], full.index(s), x_smem.index(s), pred=s < steps)
        x_places = x_smem._reinterpret(gl.bfloat16, [STAGES * A_WORD, SLICES, ROWS, 64], cube)
    twos: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    w_cubes = w_smem._reinterpret(gl.int32, [STAGES, SLICES, BLOCK_O, 32], twos)
    pairs: gl.constexpr = gl.DotOperandLayout(0, layout, 1)  # of words, as what a loop carries is not packed again
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    other_acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    zero = gl.zeros([SLICES, BLOCK_O], gl.float32, gl.SliceLayout(2, left))
    mbarrier.wait(full.index(0), 0)
    codes = w_cubes.index(0).load(pairs)
    slot = 0
    phase = 0
    for k in range(steps):
        columns = columns_of(x_places, (k if ONE else slot) * A_WORD, A_WORD, SLICES, N, ONE, right)
        _barrier()  # all warps have read the stage that is filled again
        more = k + STAGES < steps
        mbarrier.expect(full.index(slot), BYTES, pred=more)
        at = [(low + k + STAGES) * SLICES, first_o, 0, 0, 0]
        _fetch(code_tiles, at, full.index(slot), w_smem.index(slot), pred=more)
        if not ONE:
            _fetch(x_tiles, [0, (low + k + STAGES) * SLICES, 0, 0], full.index(slot), x_smem.index(slot), pred=more)

        goes_on = k + 1 < steps  # else the last step is read once more, for nothing
        wraps = slot + 1 == STAGES
        slot = gl.where(goes_on, gl.where(wraps, 0, slot + 1), slot)
        phase = gl.where(goes_on & wraps, phase ^ 1, phase)
        mbarrier.wait(full.index(slot), phase)
        next_codes = w_cubes.index(slot).load(pairs)
        for n in gl.static_range(A_WORD):
            if HAS_ZEROS:
                if n % (RUN // 64) == 0:
                    zero = zero_smem.index(k * HELD + n * 64 // RUN).load(gl.SliceLayout(2, left))
            numbers = numbers_of(piece_of(codes, n, A_WORD, left), zero, layout, KIND, HAS_ZEROS, 64)
            if GROUP > 0:  # short chains of products, which the tensor cores work at side by side
                part = mma_v2(numbers, columns[n], gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout))
                acc += part * scale_smem.index(k * HELD + n * 64 // RUN).load(gl.SliceLayout(2, layout))[:, :, None]
            elif n % 2 == 0:
                acc = mma_v2(numbers, columns[n], acc)
            else:
                other_acc = mma_v2(numbers, columns[n], other_acc)
        codes = next_codes

    total = gl.sum(acc + other_acc, axis=0)
    complete(
        total, out, row_scale, bias, y, partials, arrivals, tile, 0, split, T, O, GROUP, N, BLOCK_O, SPLITS, PARTS, HAS_BIAS,
        num_warps,
    )  # fmt: skip


def launch_quantised_hopper(x_TI: Tensor, weight: Codes, bias_O: Tensor | None, gated: bool, tiles: HopperTiles) -> Tensor:
    """[T, O], or [T, F] if gated, in bfloat16.  Rows of x must start at multiples of 16 bytes, and O be one of 8."""
    (T, I), rows = x_TI.shape, weight.codes_OJ.shape[0]
    O, parts = (rows // 2, 2) if gated else (rows, 1)
    a_word = codes_a_word(weight.kind)
    assert 0 < T and (T <= tiles.block_t or not tiles.slices) and weight.columns == I and x_TI.stride(1) == 1 and O % EIGHT == 0
    assert weight.zeros_OG is None or weight.group
    assert x_TI.dtype == torch.bfloat16 and (bias_O is None or bias_O.shape == (rows,))
    num_tiles = triton.cdiv(rows, tiles.block_o) * triton.cdiv(T, tiles.block_t)
    y_TO = x_TI.new_empty(T, O)
    partials = arrivals = y_TO
    if tiles.splits > 1:
        assert num_tiles <= ARRIVALS
        partials = x_TI.new_empty(num_tiles, tiles.splits, tiles.block_o, max(8, tiles.block_t), dtype=torch.float32)
        arrivals = arrivals_of(x_TI.device)
    scales_OG, zeros_OG = weight.scales_OG, weight.scales_OG if weight.zeros_OG is None else weight.zeros_OG
    slices, width = tiles.slices, 64 * a_word
    common = dict(
        KIND=weight.kind, GROUP=weight.group, GROUPS=kept_groups(I, weight.group, tiles.block_i, tiles.splits),
        HAS_ZEROS=weight.zeros_OG is not None, ROWS=tiles.block_t, BLOCK_O=tiles.block_o, SPLITS=tiles.splits,
        STAGES=tiles.stages, PARTS=parts, HAS_BIAS=bias_O is not None, CHUNK=CHUNK, num_warps=tiles.warps,
        **chained(x_TI.device),
    )  # fmt: skip
    planes = scales_OG, zeros_OG, scales_OG if bias_O is None else bias_O, y_TO, partials, arrivals
    sizes = T, O, I, scales_OG.shape[1]
    if slices:
        assert tiles.block_i == slices * width and I % width == 0
        codes = _slices_of(weight, parts, tiles.block_o, slices)
        shape, strides = [a_word, I // width, T, 64], [64, width, x_TI.stride(0), 1]
        block = [a_word, slices, tiles.block_t, 64]
        x_tiles = codes if tiles.block_t == 1 else TensorDescriptor(x_TI, shape, strides, block, _layout(64, 4))
        steps = triton.cdiv(triton.cdiv(I, tiles.block_i), tiles.splits)
        quantised_sliced_kernel[(num_tiles, tiles.splits)](
            x_TI, x_tiles, codes, *planes, *sizes, SLICES=slices, STEPS=steps if tiles.block_t == 1 else 0, **common
        )
    else:
        assert weight.group % (tiles.block_i // 2) == 0 and tiles.block_i % (32 * a_word) == 0
        codes = _codes_of(weight, parts, tiles.block_o, tiles.block_i // a_word)
        x_tiles = TensorDescriptor(x_TI, [T, I], [x_TI.stride(0), 1], [tiles.block_t, tiles.block_i], _layout(64, 2))
        quantised_hopper_kernel[(num_tiles, tiles.splits)](x_tiles, codes, *planes, *sizes, BLOCK_I=tiles.block_i, **common)
    return y_TO


def _codes_of(weight: Codes, parts: int, block_o: int, block_j: int) -> TensorDescriptor:
    """The copy engine's descriptor of tiles of words of codes, in which 8 rows of each part alternate."""
    words_OJ = weight.codes_OJ.view(torch.int16)
    rows, J = words_OJ.shape
    O, groups = rows // parts, block_o // parts // EIGHT
    shape, strides = [O // EIGHT, parts, EIGHT, J], [EIGHT * J, O * J, J, 1]
    return TensorDescriptor(words_OJ, shape, strides, [groups, parts, EIGHT, block_j], _layout(block_j, 4))


def _slices_of(weight: Codes, parts: int, block_o: int, slices: int) -> TensorDescriptor:
    """The same in slices of 64 words, each of which lies in shared memory by itself."""
    words_OJ = weight.codes_OJ.view(torch.int16)
    rows, J = words_OJ.shape
    O, groups = rows // parts, block_o // parts // EIGHT
    shape, strides = [J // 64, O // EIGHT, parts, EIGHT, 64], [64, EIGHT * J, O * J, J, 1]
    return TensorDescriptor(words_OJ, shape, strides, [slices, groups, parts, EIGHT, 64], _layout(64, 5))


@cache
def _layout(width: int, rank: int) -> gl.NVMMASharedLayout:
    """How tiles of 16 bits lie in shared memory: rows of at most 128 bytes, swizzled so that 8 of them are read at once."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=rank)
