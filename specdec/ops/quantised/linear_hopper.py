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
    _cells,
    _fetch,
    _finish,
    _let_the_next_kernel_start,
    _summed,
    _wait_for_the_kernel_in_front,
)
from specdec.ops.products.linear_triton import ARRIVALS, arrivals_of
from specdec.ops.quantised.codes import codes_a_word
from specdec.ops.quantised.linear_triton import E2M1_ASM, E4M3_ASM, INT4_ASM, INT8_ASM
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
    """GROUPS: whose scales a program keeps, at most.  PARTS: 2 if gated, else 1."""
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    BLOCK_J: gl.constexpr = BLOCK_I // A_WORD
    BYTES: gl.constexpr = (BLOCK_O * BLOCK_J + ROWS * BLOCK_I) * 2  # of a stage
    STEP: gl.constexpr = BLOCK_I if GROUP == 0 or GROUP > BLOCK_I else GROUP  # columns that have one scale a row
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
        _keep(scales, scale_smem, first_group, tile, O, G, GROUPS, BLOCK_O, PARTS, 1, 1, CHUNK, num_warps)
    if HAS_ZEROS:
        zero_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], row)
        _keep(zeros, zero_smem, first_group, tile, O, G, GROUPS, BLOCK_O, PARTS, 1, 1, CHUNK, num_warps)
    if GROUP > 0 or HAS_ZEROS:
        _barrier()
    if PDL:
        _wait_for_the_kernel_in_front()
        _let_the_next_kernel_start()
    for s in gl.static_range(STAGES):
        _fetch(x_tiles, [first_t, (low + s) * BLOCK_I], full.index(s), x_smem.index(s), pred=s < steps)

    flat: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128 if BLOCK_J >= 64 else 2 * BLOCK_J, element_bitwidth=16, rank=2
    )
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    acc = gl.zeros([BLOCK_O, ROWS], gl.float32, layout)
    slot = 0
    phase = 0
    for k in range(steps):
        mbarrier.wait(full.index(slot), phase)
        w = w_smem.index(slot)._reinterpret(gl.int16, [BLOCK_O, BLOCK_J], flat)
        x = x_smem.index(slot)
        for n in gl.static_range(BLOCK_I // STEP):
            codes = w.slice(n * (STEP // A_WORD), STEP // A_WORD, dim=1).load(gl.DotOperandLayout(0, layout, 2))
            columns = x.slice(n * STEP, STEP, dim=1).permute((1, 0))
            group = ((low + k) * BLOCK_I + n * STEP) // GROUP - first_group if GROUP > 0 else 0
            zero = gl.zeros([BLOCK_O], gl.float32, gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 2)))
            if HAS_ZEROS:
                zero = zero_smem.index(group).load(gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 2)))
            numbers = _numbers(codes, zero, layout, KIND, HAS_ZEROS, STEP)
            if GROUP == 0:
                acc = warpgroup_mma(numbers, columns, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
            else:
                scale = scale_smem.index(group).load(gl.SliceLayout(1, layout))
                part = warpgroup_mma(numbers, columns, gl.zeros([BLOCK_O, ROWS], gl.float32, layout), is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                acc += part * scale[:, None]
        _barrier()  # all warps have read the stage that is filled again
        more = k + STAGES < steps
        mbarrier.expect(full.index(slot), BYTES, pred=more)
        at = [tile * (BLOCK_O // PARTS // 8), 0, 0, (low + k + STAGES) * BLOCK_J]
        _fetch(code_tiles, at, full.index(slot), w_smem.index(slot), pred=more)
        _fetch(x_tiles, [first_t, (low + k + STAGES) * BLOCK_I], full.index(slot), x_smem.index(slot), pred=more)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    _complete(
        acc,
        layout,
        scales,
        bias,
        y,
        partials,
        arrivals,
        tile,
        first_t,
        split,
        T,
        O,
        GROUP,
        ROWS,
        BLOCK_O,
        SPLITS,
        PARTS,
        HAS_BIAS,
    )


@gluon.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def quantised_sliced_kernel(
    x_tiles,  # tiles [PIECES, SLICES, ROWS, 64] of x as [PIECES, I / SLICE, T, 64]
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
    PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, CHUNK: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Each warp multiplies alone, and SLICES groups of warps take different columns of a step.

    GROUPS: whose scales a program keeps, at most.  PARTS: 2 if gated, else 1.
    """
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    SLICE: gl.constexpr = 64 * A_WORD  # columns of a slice of a step: as many as lie in a row of 128 bytes
    BLOCK_I: gl.constexpr = SLICES * SLICE
    BYTES: gl.constexpr = SLICES * BLOCK_O * 128 + ROWS * BLOCK_I * 2  # of a stage
    RUN: gl.constexpr = SLICE if GROUP == 0 else GROUP  # columns that have one scale a row
    HELD: gl.constexpr = SLICE // RUN  # such runs of a slice
    tile = gl.program_id(0)
    split = gl.program_id(1)
    all_steps = gl.cdiv(I, BLOCK_I)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low
    first_o = tile * (BLOCK_O // PARTS // 8)

    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES * SLICES, BLOCK_O // PARTS // 8, PARTS, 8, 64], code_tiles.layout)
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
        _keep(scales, scale_smem, low * BLOCK_I // RUN, tile, O, G, GROUPS, BLOCK_O, PARTS, SLICES, HELD, CHUNK, num_warps)
        scale_smem = scale_smem._reinterpret(gl.float32, [GROUPS // SLICES, SLICES, BLOCK_O], pair)
    if HAS_ZEROS:
        zero_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], pair)
        _keep(zeros, zero_smem, low * BLOCK_I // RUN, tile, O, G, GROUPS, BLOCK_O, PARTS, SLICES, HELD, CHUNK, num_warps)
        zero_smem = zero_smem._reinterpret(gl.float32, [GROUPS // SLICES, SLICES, BLOCK_O], pair)
    if GROUP > 0 or HAS_ZEROS:
        _barrier()
    if PDL:
        _wait_for_the_kernel_in_front()
        _let_the_next_kernel_start()
    for s in gl.static_range(STAGES):
        _fetch(x_tiles, [0, (low + s) * SLICES, 0, 0], full.index(s), x_smem.index(s), pred=s < steps)

    cube: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    w_cubes = w_smem._reinterpret(gl.int16, [STAGES, SLICES, BLOCK_O, 64], cube)
    x_cubes = x_smem._reinterpret(gl.bfloat16, [STAGES * A_WORD, SLICES, ROWS, 64], cube)
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    acc = gl.zeros([SLICES, BLOCK_O, ROWS], gl.float32, layout)
    slot = 0
    phase = 0
    for k in range(steps):
        mbarrier.wait(full.index(slot), phase)
        w = w_cubes.index(slot)
        for n in gl.static_range(A_WORD):
            if n % (RUN // 64) == 0:
                part = gl.zeros([SLICES, BLOCK_O, ROWS], gl.float32, layout)
                zero = gl.zeros([SLICES, BLOCK_O], gl.float32, gl.SliceLayout(2, left))
                if HAS_ZEROS:
                    zero = zero_smem.index(k * HELD + n * 64 // RUN).load(gl.SliceLayout(2, left))
            codes = w.slice(n * (64 // A_WORD), 64 // A_WORD, dim=2).load(left)
            columns = x_cubes.index(slot * A_WORD + n).permute((0, 2, 1)).load(gl.DotOperandLayout(1, layout, 2))
            numbers = _numbers(codes, zero, layout, KIND, HAS_ZEROS, 64)
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
        _fetch(x_tiles, [0, (low + k + STAGES) * SLICES, 0, 0], full.index(slot), x_smem.index(slot), pred=more)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    out: gl.constexpr = gl.SliceLayout(0, layout)
    total = gl.sum(acc, axis=0)
    _complete(
        total, out, scales, bias, y, partials, arrivals, tile, 0, split, T, O, GROUP, ROWS, BLOCK_O, SPLITS, PARTS, HAS_BIAS
    )


@gluon.jit
def _complete(
    acc, layout: gl.constexpr, scales, bias, y, partials, arrivals, tile, first_t, split, T, O,
    GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_O: gl.constexpr, SPLITS: gl.constexpr, PARTS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Multiplies by the rows' scales, adds up the splits, and stores."""
    if GROUP == 0:
        row_O = _weight_rows(gl.arange(0, BLOCK_O, gl.SliceLayout(1, layout)), tile, O, BLOCK_O, PARTS)
        acc *= gl.load(scales + row_O, mask=row_O < PARTS * O, other=0.0).to(gl.float32)[:, None]
    if SPLITS == 1:
        _finish(acc, layout, bias, y, tile, first_t, T, O, ROWS, BLOCK_O, PARTS, HAS_BIAS)
    else:  # the program of this tile that arrives last sums all partial results, in a fixed order
        SIZE: gl.constexpr = BLOCK_O * ROWS
        counted = gl.program_id(0)
        mine = partials + counted.to(gl.int64) * (SPLITS * SIZE)
        gl.store(mine + split * SIZE + _cells(layout, 0, ROWS, BLOCK_O, ROWS), acc)
        _barrier()  # all of this program's stores before its arrival
        if gl.atomic_add(arrivals + counted, 1, sem="acq_rel") == SPLITS - 1:
            gl.store(arrivals + counted, 0)
            acc = _summed(mine, layout, 0, ROWS, ROWS, BLOCK_O, SPLITS)
            _finish(acc, layout, bias, y, tile, first_t, T, O, ROWS, BLOCK_O, PARTS, HAS_BIAS)


@gluon.jit
def _weight_rows(r, tile, O, BLOCK_O: gl.constexpr, PARTS: gl.constexpr):
    """The weight's rows that are rows r of a tile."""
    return tile * (BLOCK_O // PARTS) + r // (8 * PARTS) * 8 + r % 8 + r // 8 % PARTS * O


@gluon.jit
def _keep(
    of_groups, smem, first_group, tile, O, G, GROUPS: gl.constexpr, BLOCK_O: gl.constexpr, PARTS: gl.constexpr,
    SLICES: gl.constexpr, HELD: gl.constexpr, CHUNK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Scales or zeros of a program's rows and groups in shared memory, as float32 [GROUPS, BLOCK_O].

    The groups that slices need at one time lie next to each other.  HELD: groups of a slice of a step.
    """
    square: gl.constexpr = gl.BlockedLayout([CHUNK, 1], [1, 32], [1, num_warps], [0, 1])
    chunks = smem._reinterpret(gl.float32, [GROUPS // CHUNK, CHUNK, BLOCK_O], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row_O = _weight_rows(gl.arange(0, BLOCK_O, gl.SliceLayout(0, square)), tile, O, BLOCK_O, PARTS)
    for c in range(GROUPS // CHUNK):
        at = c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, square))
        group = first_group + (at // (SLICES * HELD) * SLICES + at % SLICES) * HELD + at // SLICES % HELD
        ok = (group < G)[:, None] & (row_O < PARTS * O)[None, :]
        value = gl.load(of_groups + row_O.to(gl.int64)[None, :] * G + group[:, None], mask=ok, other=0)
        chunks.index(c).store(value.to(gl.float32))


@gluon.jit
def _numbers(codes, zero, layout: gl.constexpr, KIND: gl.constexpr, HAS_ZEROS: gl.constexpr, STEP: gl.constexpr):
    """The numbers of words of codes, [..., STEP] for [..., J], as the first operand of the tensor cores.

    A word's codes are 16 columns apart (see codes.py), and a register's pairs stay where they are.
    """
    RANK: gl.constexpr = len(codes.shape)
    if HAS_ZEROS:
        zero = gl.expand_dims(zero, RANK - 1)
    if KIND == "int4" or KIND == "e2m1":
        if KIND == "e2m1":
            a, b, c, d = gl.inline_asm_elementwise(
                E2M1_ASM, "=r,=r,=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True,
                pack=2,
            )  # fmt: skip
        else:
            middle = gl.full(codes.shape, 136, gl.bfloat16, codes.type.layout)
            if HAS_ZEROS:
                middle = (zero + 136).to(gl.bfloat16).broadcast_to(codes.shape)
            a, b, c, d = gl.inline_asm_elementwise(
                INT4_ASM, "=r,=r,=r,=r,r,r,r", [codes, middle, middle],
                dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        both = gl.join(gl.join(a, c), gl.join(b, d))  # the last two dims: the lower and the upper bit of a code's place
        if RANK == 2:
            both = gl.permute(gl.reshape(both, [codes.shape[0], STEP // 64, 16, 2, 2]), (0, 1, 3, 4, 2))
        else:
            both = gl.reshape(both, [codes.shape[0], codes.shape[1], STEP // 64, 16, 2, 2])
            both = gl.permute(both, (0, 1, 2, 4, 5, 3))
    else:
        PROGRAM: gl.constexpr = E4M3_ASM if KIND == "e4m3" else INT8_ASM
        a, b = gl.inline_asm_elementwise(PROGRAM, "=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
        if HAS_ZEROS:
            a, b = a - zero.to(gl.bfloat16), b - zero.to(gl.bfloat16)
        if RANK == 2:
            both = gl.permute(gl.reshape(gl.join(a, b), [codes.shape[0], STEP // 32, 16, 2]), (0, 1, 3, 2))
        else:
            both = gl.reshape(gl.join(a, b), [codes.shape[0], codes.shape[1], STEP // 32, 16, 2])
            both = gl.permute(both, (0, 1, 2, 4, 3))
    flat = gl.reshape(both, [codes.shape[0], STEP] if RANK == 2 else [codes.shape[0], codes.shape[1], STEP])
    return gl.convert_layout(flat, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


def launch_quantised_hopper(x_TI: Tensor, weight: Codes, bias_O: Tensor | None, gated: bool, tiles: HopperTiles) -> Tensor:
    """[T, O], or [T, F] if gated, in bfloat16.  Rows of x must start at multiples of 16 bytes, and O be one of 8."""
    (T, I), rows = x_TI.shape, weight.codes_OJ.shape[0]
    O, parts = (rows // 2, 2) if gated else (rows, 1)
    a_word = codes_a_word(weight.kind)
    assert 0 < T and (T <= tiles.block_t or not tiles.slices) and weight.columns == I and x_TI.stride(1) == 1 and O % EIGHT == 0
    assert x_TI.dtype == torch.bfloat16 and (bias_O is None or bias_O.shape == (rows,))
    num_tiles = triton.cdiv(rows, tiles.block_o) * triton.cdiv(T, tiles.block_t)
    y_TO = x_TI.new_empty(T, O)
    partials = arrivals = y_TO
    if tiles.splits > 1:
        assert num_tiles <= ARRIVALS
        partials = x_TI.new_empty(num_tiles, tiles.splits, tiles.block_o, tiles.block_t, dtype=torch.float32)
        arrivals = arrivals_of(x_TI.device)
    scales_OG, zeros_OG = weight.scales_OG, weight.scales_OG if weight.zeros_OG is None else weight.zeros_OG
    groups = kept_groups(I, weight.group, tiles.block_i, tiles.splits)
    slices = tiles.slices
    if slices:
        assert tiles.block_i == slices * 64 * a_word and I % (64 * a_word) == 0
        x_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
        shape, strides = [a_word, I // (64 * a_word), T, 64], [64, 64 * a_word, x_TI.stride(0), 1]
        x_tiles = TensorDescriptor(x_TI, shape, strides, [a_word, slices, tiles.block_t, 64], x_layout)
        options = {"SLICES": slices}
    else:
        x_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        x_tiles = TensorDescriptor(x_TI, [T, I], [x_TI.stride(0), 1], [tiles.block_t, tiles.block_i], x_layout)
        options = {"BLOCK_I": tiles.block_i}
    kernel = quantised_sliced_kernel if slices else quantised_hopper_kernel
    kernel[(num_tiles, tiles.splits)](
        x_tiles, _codes_of(weight, parts, tiles.block_o, 64 if slices else tiles.block_i // a_word), scales_OG, zeros_OG,
        scales_OG if bias_O is None else bias_O, y_TO, partials, arrivals, T, O, I, scales_OG.shape[1],
        KIND=weight.kind, GROUP=weight.group, GROUPS=groups, HAS_ZEROS=weight.zeros_OG is not None,
        ROWS=tiles.block_t, BLOCK_O=tiles.block_o, SPLITS=tiles.splits, STAGES=tiles.stages,
        PARTS=parts, HAS_BIAS=bias_O is not None, CHUNK=CHUNK, **options,
        num_warps=tiles.warps, **chained(x_TI.device),
    )  # fmt: skip
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
