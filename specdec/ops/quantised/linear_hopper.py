"""The product of few rows with a weight of 8 or 4 bits, written in Gluon for Hopper GPUs.

It is ops/products/linear_hopper.py's kernel, whose docstring explains the order of loads and waits, over codes instead of
numbers: the copy engine (TMA) fills all stages with codes before the product's input exists.  Codes go from shared memory to
registers, are converted there to bfloat16, in which every code is exact, and are the first operand of the tensor cores.  Scales
multiply float32 sums.  So nothing is rounded before the end.

- A scale for each row is applied once, to the complete sum.
- Scales for groups of columns, and zeros, lie in shared memory before the wait too, since no kernel writes them.  A group's sum
  is multiplied by its scale.

This module knows no model's shapes and chooses no tiles.

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
from specdec.ops.quantised.parts_hopper import complete, keep, numbers_of, scales_of_rows, whole_row
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
    """Four warps multiply together.  The codes of the next step are converted meanwhile.  A step has one scale a row.

    GROUPS: whose scales a program keeps, at most.  PARTS: 2 if gated, else 1.
    """
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    BLOCK_J: gl.constexpr = BLOCK_I // A_WORD
    BYTES: gl.constexpr = (BLOCK_O * BLOCK_J + ROWS * BLOCK_I) * 2  # of a stage
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
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), BYTES, pred=s < steps)
        at = [tile * (BLOCK_O // PARTS // 8), 0, 0, (low + s) * BLOCK_J]
        _fetch(code_tiles, at, full.index(s), w_smem.index(s), pred=s < steps)

    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first_group = low * BLOCK_I // GROUP if GROUP > 0 else 0
    if GROUP > 0:
        scale_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], row)
        keep(scales, scale_smem, first_group, tile, O, G, GROUPS, BLOCK_O, PARTS, 1, 1, CHUNK, num_warps)
    if HAS_ZEROS:
        zero_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], row)
        keep(zeros, zero_smem, first_group, tile, O, G, GROUPS, BLOCK_O, PARTS, 1, 1, CHUNK, num_warps)
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
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    acc = gl.zeros([BLOCK_O, ROWS], gl.float32, layout)
    zero = gl.zeros([BLOCK_O], gl.float32, gl.SliceLayout(1, left))
    if HAS_ZEROS:
        zero = zero_smem.index(0).load(gl.SliceLayout(1, left))
    mbarrier.wait(full.index(0), 0)
    numbers = numbers_of(w_tiles.index(0).load(left), zero, layout, KIND, HAS_ZEROS, BLOCK_I)
    slot = 0
    phase = 0
    for k in range(steps):
        if GROUP > 0:
            part = gl.zeros([BLOCK_O, ROWS], gl.float32, layout)
            part = warpgroup_mma(numbers, x_smem.index(slot).permute((1, 0)), part, is_async=True)
        else:
            acc = warpgroup_mma(numbers, x_smem.index(slot).permute((1, 0)), acc, is_async=True)
        more = k + 1 < steps  # else the last step's codes are converted once more, for nothing
        next_slot = gl.where(more, gl.where(slot + 1 == STAGES, 0, slot + 1), slot)
        next_phase = gl.where(more & (slot + 1 == STAGES), phase ^ 1, phase)
        mbarrier.wait(full.index(next_slot), next_phase)
        if HAS_ZEROS:
            group = (low + gl.minimum(k + 1, steps - 1)) * BLOCK_I // GROUP - first_group if GROUP > 0 else 0
            zero = zero_smem.index(group).load(gl.SliceLayout(1, left))
        next_numbers = numbers_of(w_tiles.index(next_slot).load(left), zero, layout, KIND, HAS_ZEROS, BLOCK_I)
        if GROUP > 0:
            group = (low + k) * BLOCK_I // GROUP - first_group
            scale = scale_smem.index(group).load(gl.SliceLayout(1, layout))
            part, numbers, next_numbers = warpgroup_mma_wait(0, deps=(part, numbers, next_numbers))
            acc += part * scale[:, None]
        else:
            acc, numbers, next_numbers = warpgroup_mma_wait(0, deps=(acc, numbers, next_numbers))
        _barrier()  # all warps have read the stage that is filled again
        more = k + STAGES < steps
        mbarrier.expect(full.index(slot), BYTES, pred=more)
        at = [tile * (BLOCK_O // PARTS // 8), 0, 0, (low + k + STAGES) * BLOCK_J]
        _fetch(code_tiles, at, full.index(slot), w_smem.index(slot), pred=more)
        _fetch(x_tiles, [first_t, (low + k + STAGES) * BLOCK_I], full.index(slot), x_smem.index(slot), pred=more)
        numbers = next_numbers
        slot = next_slot
        phase = next_phase

    complete(
        acc, layout, scale, bias, y, partials, arrivals, tile, first_t, split, T, O, GROUP, ROWS, BLOCK_O, SPLITS, PARTS,
        HAS_BIAS, num_warps,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def quantised_sliced_kernel(
    x,  # [1, I] if ROWS is 1
    x_tiles,  # else tiles [A_WORD, SLICES, ROWS, 64] of x as [A_WORD, I / SLICE, T, 64]
    code_tiles,  # tiles [BLOCK_O / PARTS / 8, PARTS, 8, 64] of the words as [O / 8, PARTS, 8, J]
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

    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES * SLICES, BLOCK_O // PARTS // 8, PARTS, 8, 64], code_tiles.layout)
    if not ONE:
        x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, A_WORD, SLICES, ROWS, 64], x_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), BYTES, pred=s < steps)
    for s in gl.static_range(STAGES):
        for n in gl.static_range(SLICES):
            at = [first_o, 0, 0, ((low + s) * SLICES + n) * 64]
            _fetch(code_tiles, at, full.index(s), w_smem.index(s * SLICES + n), pred=s < steps)

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
        x_pieces = whole_row(x, low, I, A_WORD, SLICES, STEPS, num_warps)
    else:
        for s in gl.static_range(STAGES):
            _fetch(x_tiles, [0, (low + s) * SLICES, 0, 0], full.index(s), x_smem.index(s), pred=s < steps)
        x_cubes = x_smem._reinterpret(gl.bfloat16, [STAGES * A_WORD, SLICES, ROWS, 64], cube)
    w_cubes = w_smem._reinterpret(gl.int16, [STAGES, SLICES, BLOCK_O, 64], cube)
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    slot = 0
    phase = 0
    for k in range(steps):
        mbarrier.wait(full.index(slot), phase)
        w = w_cubes.index(slot)
        for n in gl.static_range(A_WORD):
            if n % (RUN // 64) == 0:
                part = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
                zero = gl.zeros([SLICES, BLOCK_O], gl.float32, gl.SliceLayout(2, left))
                if HAS_ZEROS:
                    zero = zero_smem.index(k * HELD + n * 64 // RUN).load(gl.SliceLayout(2, left))
            codes = w.slice(n * (64 // A_WORD), 64 // A_WORD, dim=2).load(left)
            if ONE:
                columns = x_pieces.index(k * A_WORD + n).load(gl.SliceLayout(2, right))
                columns = gl.expand_dims(columns, 2).broadcast_to([SLICES, 64, N])
            else:
                columns = x_cubes.index(slot * A_WORD + n).permute((0, 2, 1)).load(right)
            numbers = numbers_of(codes, zero, layout, KIND, HAS_ZEROS, 64)
            if GROUP == 0:
                acc = mma_v2(numbers, columns, acc)
            else:
                part = mma_v2(numbers, columns, part)
                if (n + 1) % (RUN // 64) == 0:
                    acc += part * scale_smem.index(k * HELD + n * 64 // RUN).load(gl.SliceLayout(2, layout))[:, :, None]
        _barrier()  # all warps have read the stage that is filled again
        more = k + STAGES < steps
        mbarrier.expect(full.index(slot), BYTES, pred=more)
        for n in gl.static_range(SLICES):
            at = [first_o, 0, 0, ((low + k + STAGES) * SLICES + n) * 64]
            _fetch(code_tiles, at, full.index(slot), w_smem.index(slot * SLICES + n), pred=more)
        if not ONE:
            _fetch(x_tiles, [0, (low + k + STAGES) * SLICES, 0, 0], full.index(slot), x_smem.index(slot), pred=more)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    total = gl.sum(acc, axis=0)
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
        codes = _codes_of(weight, parts, tiles.block_o, 64)
        shape, strides = [a_word, I // width, T, 64], [64, width, x_TI.stride(0), 1]
        block = [a_word, slices, tiles.block_t, 64]
        x_tiles = codes if tiles.block_t == 1 else TensorDescriptor(x_TI, shape, strides, block, _layout(64))
        steps = triton.cdiv(triton.cdiv(I, tiles.block_i), tiles.splits)
        quantised_sliced_kernel[(num_tiles, tiles.splits)](
            x_TI, x_tiles, codes, *planes, *sizes, SLICES=slices, STEPS=steps if tiles.block_t == 1 else 0, **common
        )
    else:
        assert weight.group % tiles.block_i == 0
        codes = _codes_of(weight, parts, tiles.block_o, tiles.block_i // a_word)
        x_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        x_tiles = TensorDescriptor(x_TI, [T, I], [x_TI.stride(0), 1], [tiles.block_t, tiles.block_i], x_layout)
        quantised_hopper_kernel[(num_tiles, tiles.splits)](x_tiles, codes, *planes, *sizes, BLOCK_I=tiles.block_i, **common)
    return y_TO


def _codes_of(weight: Codes, parts: int, block_o: int, block_j: int) -> TensorDescriptor:
    """The copy engine's descriptor of tiles of words of codes, in which 8 rows of each part alternate."""
    words_OJ = weight.codes_OJ.view(torch.int16)
    rows, J = words_OJ.shape
    O, groups = rows // parts, block_o // parts // EIGHT
    shape, strides = [O // EIGHT, parts, EIGHT, J], [EIGHT * J, O * J, J, 1]
    return TensorDescriptor(words_OJ, shape, strides, [groups, parts, EIGHT, block_j], _layout(block_j))


@cache
def _layout(block_j: int) -> gl.NVMMASharedLayout:
    """How tiles of words lie in shared memory: rows of at most 128 bytes, swizzled so that 8 of them are read at once."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * block_j), element_bitwidth=16, rank=4)
