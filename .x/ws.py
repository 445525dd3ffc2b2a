"""scratch: the two kernels with a loader warp of their own (warp specialisation)"""
from __future__ import annotations
from functools import cache
import torch, triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, async_copy
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from specdec.ops.launch import chained
from specdec.ops.products.linear_hopper import EIGHT, _barrier, _cells, _fetch, _finish, _let_the_next_kernel_start, _wait_for_the_kernel_in_front
from specdec.ops.products.linear_triton import ARRIVALS, arrivals_of
from specdec.ops.quantised.codes import codes_a_word
from specdec.ops.quantised.linear_hopper import _begin, _end, _half, _layout
from specdec.ops.quantised.parts_hopper import columns_of, keep, numbers_of, piece_of, scales_of_rows, weight_rows
from specdec.ops.quantised.tiles import CHUNK, kept_groups


@gluon.jit
def complete(
    acc, layout: gl.constexpr, scale, bias, y, partials, arrivals, tile, counted, first_t, split, T, O,
    GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_O: gl.constexpr, SPLITS: gl.constexpr, PARTS: gl.constexpr,
    HAS_BIAS: gl.constexpr, WARPS: gl.constexpr,
):
    if GROUP == 0:
        acc *= scale[:, None]
    if SPLITS == 1:
        _finish(acc, layout, bias, y, tile, first_t, T, O, ROWS, BLOCK_O, PARTS, HAS_BIAS)
    else:
        SIZE: gl.constexpr = BLOCK_O * ROWS
        mine = partials + counted.to(gl.int64) * (SPLITS * SIZE)
        cell = _cells(layout, 0, ROWS, BLOCK_O, ROWS)
        gl.store(mine + split * SIZE + cell, acc)
        _barrier()
        if gl.atomic_add(arrivals + counted, 1, sem="acq_rel") == SPLITS - 1:
            gl.store(arrivals + counted, 0)
            acc = gl.zeros([BLOCK_O, ROWS], gl.float32, layout)
            if SIZE * SPLITS <= 4096 * WARPS:
                for s in gl.static_range(SPLITS):
                    acc += gl.load(mine + s * SIZE + cell, cache_modifier=".cg")
            else:
                for s in range(SPLITS):
                    acc += gl.load(mine + s * SIZE + cell, cache_modifier=".cg")
            _finish(acc, layout, bias, y, tile, first_t, T, O, ROWS, BLOCK_O, PARTS, HAS_BIAS)


# ---------------------------------------------------------------- wide
@gluon.jit
def wide_loader(
    x_tiles, code_tiles, x_smem, w_smem, full_w, full_x, empty, first_o, first_t, low, steps,
    BLOCK_O: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, ROWS: gl.constexpr, CONSUMERS: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):
    # CONSUMERS: boxes of rows a stage
    W_BYTES: gl.constexpr = CONSUMERS * BLOCK_O * BLOCK_J * 2
    X_BYTES: gl.constexpr = ROWS * BLOCK_I * 2
    EACH: gl.constexpr = BLOCK_O // PARTS // 8
    for s in gl.static_range(STAGES):
        if s < steps:
            mbarrier.expect(full_w.index(s), W_BYTES)
            for c in gl.static_range(CONSUMERS):
                _fetch(code_tiles, [first_o + c * EACH, 0, 0, (low + s) * BLOCK_J], full_w.index(s), w_smem.index(s * CONSUMERS + c))
    if PDL:
        _wait_for_the_kernel_in_front()
        _let_the_next_kernel_start()
    for s in gl.static_range(STAGES):
        if s < steps:
            mbarrier.expect(full_x.index(s), X_BYTES)
            _fetch(x_tiles, [first_t, (low + s) * BLOCK_I], full_x.index(s), x_smem.index(s))
    slot = 0
    phase = 0
    for k in range(STAGES, steps):
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full_w.index(slot), W_BYTES)
        for c in gl.static_range(CONSUMERS):
            _fetch(code_tiles, [first_o + c * EACH, 0, 0, (low + k) * BLOCK_J], full_w.index(slot), w_smem.index(slot * CONSUMERS + c))
        mbarrier.expect(full_x.index(slot), X_BYTES)
        _fetch(x_tiles, [first_t, (low + k) * BLOCK_I], full_x.index(slot), x_smem.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def wide_consumer(
    x_smem, w_tiles, scale_smem, zero_smem, full_w, full_x, empty, scales, zeros, bias, y, partials, arrivals,
    program, first_t, split, low, steps, T, O, I, G, red, done,
    c: gl.constexpr, BOXES: gl.constexpr, EVERY: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, HAS_ZEROS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_I: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, CHUNK: gl.constexpr,
):
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    HALF: gl.constexpr = BLOCK_I // 2
    MORE: gl.constexpr = HALF // GROUP if GROUP > 0 else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    of_t = gl.cdiv(T, ROWS)
    box: gl.constexpr = c if BOXES > 1 else 0
    tile = program // of_t * BOXES + box
    counted = program * BOXES + box
    first: gl.constexpr = c if EVERY > 1 else 0
    first_group = low * BLOCK_I // GROUP if GROUP > 0 else 0
    if GROUP > 0:
        keep(scales, scale_smem, first_group, tile, O, G, GROUPS, BLOCK_O, PARTS, 1, 1, CHUNK, 4)
    if HAS_ZEROS:
        keep(zeros, zero_smem, first_group, tile, O, G, GROUPS, BLOCK_O, PARTS, 1, 1, CHUNK, 4)
    if GROUP > 0 or HAS_ZEROS:
        _barrier()
    scale = scales_of_rows(scales, tile, O, GROUP, BLOCK_O, PARTS, layout)
    acc = gl.zeros([BLOCK_O, ROWS], gl.float32, layout)
    mbarrier.wait(full_w.index(first), 0)
    first_g = (low + first) * BLOCK_I // GROUP - first_group if GROUP > 0 else 0
    numbers = _half(w_tiles.index(first * BOXES + box), 0, zero_smem, first_g, KIND, HAS_ZEROS, HALF, A_WORD, BLOCK_O, layout)
    slot = first
    phase = 0
    for k in range(first, steps, EVERY):
        group = (low + k) * BLOCK_I // GROUP - first_group if GROUP > 0 else 0
        mbarrier.wait(full_x.index(slot), phase)
        x = x_smem.index(slot)
        part = _begin(numbers, x, 0, acc, GROUP, HALF)
        w = w_tiles.index(slot * BOXES + box)
        others = _half(w, 1, zero_smem, group + MORE, KIND, HAS_ZEROS, HALF, A_WORD, BLOCK_O, layout)
        acc = _end(part, numbers, acc, scale_smem, group, GROUP, layout)
        part = _begin(others, x, 1, acc, GROUP, HALF)
        more = k + EVERY < steps
        wraps = slot + EVERY >= STAGES
        next_slot = gl.where(more, gl.where(wraps, slot + EVERY - STAGES, slot + EVERY), slot)
        next_phase = gl.where(more & wraps, phase ^ 1, phase)
        mbarrier.wait(full_w.index(next_slot), next_phase)
        next_group = (low + gl.where(more, k + EVERY, k)) * BLOCK_I // GROUP - first_group if GROUP > 0 else 0
        numbers = _half(w_tiles.index(next_slot * BOXES + box), 0, zero_smem, next_group, KIND, HAS_ZEROS, HALF, A_WORD, BLOCK_O, layout)
        acc = _end(part, others, acc, scale_smem, group + MORE, GROUP, layout)
        mbarrier.arrive(empty.index(slot), count=1)
        slot = next_slot
        phase = next_phase
    if EVERY > 1 and c == 1:
        red.store(acc)
        _barrier()
        mbarrier.arrive(done, count=1)
    else:
        if EVERY > 1:
            mbarrier.wait(done, 0)
            acc += red.load(layout)
        complete(
            acc, layout, scale, bias, y, partials, arrivals, tile, counted, first_t, split, T, O, GROUP, ROWS, BLOCK_O, SPLITS,
            PARTS, HAS_BIAS, 4,
        )


@gluon.jit(do_not_specialize=["T"])
def ws_wide_kernel(
    x_tiles, code_tiles, scales, zeros, bias, y, partials, arrivals, T, O, I, G,
    KIND: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, HAS_ZEROS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_I: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, EVERY: gl.constexpr, LOADER_REGS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
    PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, CHUNK: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):
    """BLOCK_O: of a consumer, of which a program has CONSUMERS."""
    BOXES: gl.constexpr = CONSUMERS // EVERY
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    BLOCK_J: gl.constexpr = BLOCK_I // A_WORD
    of_t = gl.cdiv(T, ROWS)
    program = gl.program_id(0)
    first_t = program % of_t * ROWS
    split = gl.program_id(1)
    all_steps = gl.cdiv(I, BLOCK_I)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low
    first_o = program // of_t * (BOXES * BLOCK_O // PARTS // 8)

    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES * BOXES, BLOCK_O // PARTS // 8, PARTS, 8, BLOCK_J], code_tiles.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK_I], x_tiles.layout)
    full_w = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full_w.index(s), count=1)
        mbarrier.init(full_x.index(s), count=1)
        mbarrier.init(empty.index(s), count=BOXES)
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if GROUP > 0:
        scale_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], row)
        scale_smem_1 = gl.allocate_shared_memory(gl.float32, [GROUPS if CONSUMERS > 1 else 1, BLOCK_O], row)
    else:
        scale_smem = full_w
        scale_smem_1 = full_w
    if HAS_ZEROS:
        zero_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], row)
        zero_smem_1 = gl.allocate_shared_memory(gl.float32, [GROUPS if CONSUMERS > 1 else 1, BLOCK_O], row)
    else:
        zero_smem = full_w
        zero_smem_1 = full_w
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=1)
    if EVERY > 1:
        red = gl.allocate_shared_memory(gl.float32, [BLOCK_O, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    else:
        red = done
    _barrier()
    flat: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128 if BLOCK_J >= 64 else 2 * BLOCK_J, element_bitwidth=16, rank=2
    )
    w_tiles = w_smem._reinterpret(gl.int16, [STAGES * BOXES, BLOCK_O, BLOCK_J], flat)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (wide_consumer, (x_smem, w_tiles, scale_smem, zero_smem, full_w, full_x, empty, scales, zeros, bias, y, partials,
                                 arrivals, program, first_t, split, low, steps, T, O, I, G, red, done, 0, BOXES, EVERY, KIND, GROUP, GROUPS, HAS_ZEROS, ROWS,
                                 BLOCK_O, BLOCK_I, SPLITS, STAGES, CONSUMERS, PARTS, HAS_BIAS, CHUNK)),
                (wide_loader, (x_tiles, code_tiles, x_smem, w_smem, full_w, full_x, empty, first_o, first_t, low, steps,
                               BLOCK_O, BLOCK_I, BLOCK_J, ROWS, BOXES, PARTS, STAGES, PDL)),
            ],
            [1], [LOADER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (wide_consumer, (x_smem, w_tiles, scale_smem, zero_smem, full_w, full_x, empty, scales, zeros, bias, y, partials,
                                 arrivals, program, first_t, split, low, steps, T, O, I, G, red, done, 0, BOXES, EVERY, KIND, GROUP, GROUPS, HAS_ZEROS, ROWS,
                                 BLOCK_O, BLOCK_I, SPLITS, STAGES, CONSUMERS, PARTS, HAS_BIAS, CHUNK)),
                (wide_consumer, (x_smem, w_tiles, scale_smem_1, zero_smem_1, full_w, full_x, empty, scales, zeros, bias, y, partials,
                                 arrivals, program, first_t, split, low, steps, T, O, I, G, red, done, 1, BOXES, EVERY, KIND, GROUP, GROUPS, HAS_ZEROS, ROWS,
                                 BLOCK_O, BLOCK_I, SPLITS, STAGES, CONSUMERS, PARTS, HAS_BIAS, CHUNK)),
                (wide_loader, (x_tiles, code_tiles, x_smem, w_smem, full_w, full_x, empty, first_o, first_t, low, steps,
                               BLOCK_O, BLOCK_I, BLOCK_J, ROWS, BOXES, PARTS, STAGES, PDL)),
            ],
            [4, 1], [CONSUMER_REGS, LOADER_REGS],
        )


def launch_wide(x_TI, weight, bias_O, gated, tiles):
    """tiles: block_t, block_o (of a consumer), block_i, splits, consumers, stages, maxnreg, consumer regs, every"""
    block_t, block_o, block_i, splits, consumers, stages, maxnreg, regs, every = tiles
    boxes = consumers // every
    assert consumers in (1, 2) and every in (1, consumers) and stages >= every
    (T, I), rows = x_TI.shape, weight.codes_OJ.shape[0]
    O, parts = (rows // 2, 2) if gated else (rows, 1)
    a_word = codes_a_word(weight.kind)
    programs = triton.cdiv(rows, block_o * boxes) * triton.cdiv(T, block_t)
    y_TO = x_TI.new_empty(T, O)
    partials = arrivals = y_TO
    if splits > 1:
        assert programs * boxes <= ARRIVALS
        partials = x_TI.new_empty(programs * boxes, splits, block_o, block_t, dtype=torch.float32)
        arrivals = arrivals_of(x_TI.device)
    scales_OG = weight.scales_OG
    zeros_OG = scales_OG if weight.zeros_OG is None else weight.zeros_OG
    words_OJ = weight.codes_OJ.view(torch.int16)
    J = words_OJ.shape[1]
    codes = TensorDescriptor(words_OJ, [O // EIGHT, parts, EIGHT, J], [EIGHT * J, O * J, J, 1], [block_o // parts // EIGHT, parts, EIGHT, block_i // a_word], _layout(block_i // a_word, 4))
    x_tiles = TensorDescriptor(x_TI, [T, I], [x_TI.stride(0), 1], [block_t, block_i], _layout(64, 2))
    assert weight.group % (block_i // 2) == 0 and block_i % (32 * a_word) == 0
    more = {"maxnreg": maxnreg} if maxnreg else {}
    return ws_wide_kernel[(programs, splits)](
        x_tiles, codes, scales_OG, zeros_OG, scales_OG if bias_O is None else bias_O, y_TO, partials, arrivals, T, O, I, scales_OG.shape[1],
        KIND=weight.kind, GROUP=weight.group, GROUPS=kept_groups(I, weight.group, block_i, splits), HAS_ZEROS=weight.zeros_OG is not None,
        ROWS=block_t, BLOCK_O=block_o, BLOCK_I=block_i, SPLITS=splits, STAGES=stages, CONSUMERS=consumers, EVERY=every, LOADER_REGS=24, CONSUMER_REGS=regs,
        PARTS=parts, HAS_BIAS=bias_O is not None, CHUNK=CHUNK, num_warps=4, **more, **chained(x_TI.device),
    ), y_TO


# ---------------------------------------------------------------- sliced
@gluon.jit
def row_of_x(x, smem, low, I, A_WORD: gl.constexpr, SLICES: gl.constexpr, TIMES: gl.constexpr, WARPS: gl.constexpr):
    SLICE: gl.constexpr = 64 * A_WORD
    AT_ONCE: gl.constexpr = 256 * WARPS
    for n in gl.static_range(TIMES):
        p = n * AT_ONCE + gl.arange(0, AT_ONCE, gl.BlockedLayout([8], [32], [WARPS], [0]))
        at = (low + p // (SLICES * SLICE)) * SLICES + p // 64 % SLICES
        column = at * SLICE + p // (64 * SLICES) % A_WORD * 64 + p % 64
        async_copy.async_copy_global_to_shared(smem.index(n), x + column, mask=column < I, cache_modifier=".cg")
    async_copy.commit_group()
    async_copy.wait_group(0)
    _barrier()
    return smem._reinterpret(
        gl.bfloat16, [TIMES * AT_ONCE // (64 * SLICES), SLICES, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )


@gluon.jit
def sliced_loader(
    x_tiles, code_tiles, x_smem, w_smem, full_w, full_x, empty, first_o, low, steps,
    BLOCK_O: gl.constexpr, SLICES: gl.constexpr, A_WORD: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):
    ONE: gl.constexpr = ROWS == 1
    W_BYTES: gl.constexpr = SLICES * BLOCK_O * 128
    X_BYTES: gl.constexpr = ROWS * SLICES * 64 * A_WORD * 2
    for s in gl.static_range(STAGES):
        if s < steps:
            mbarrier.expect(full_w.index(s), W_BYTES)
            _fetch(code_tiles, [(low + s) * SLICES, first_o, 0, 0, 0], full_w.index(s), w_smem.index(s))
    if not ONE:
        if PDL:
            _wait_for_the_kernel_in_front()
            _let_the_next_kernel_start()
        for s in gl.static_range(STAGES):
            if s < steps:
                mbarrier.expect(full_x.index(s), X_BYTES)
                _fetch(x_tiles, [0, (low + s) * SLICES, 0, 0], full_x.index(s), x_smem.index(s))
    slot = 0
    phase = 0
    for k in range(STAGES, steps):
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full_w.index(slot), W_BYTES)
        _fetch(code_tiles, [(low + k) * SLICES, first_o, 0, 0, 0], full_w.index(slot), w_smem.index(slot))
        if not ONE:
            mbarrier.expect(full_x.index(slot), X_BYTES)
            _fetch(x_tiles, [0, (low + k) * SLICES, 0, 0], full_x.index(slot), x_smem.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def sliced_consumer(
    x, x_smem, w_cubes, scale_smem, zero_smem, full_w, full_x, empty, scales, zeros, bias, y, partials, arrivals,
    tile, split, low, steps, T, O, I, G,
    KIND: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, HAS_ZEROS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_O: gl.constexpr, SLICES: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    TIMES: gl.constexpr, PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, CHUNK: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
    PARTLY: gl.constexpr,
):
    """PARTLY: numbers of the first piece are there before x."""
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    SLICE: gl.constexpr = 64 * A_WORD
    BLOCK_I: gl.constexpr = SLICES * SLICE
    ONE: gl.constexpr = ROWS == 1
    N: gl.constexpr = 8 if ONE else ROWS
    RUN: gl.constexpr = SLICE if GROUP == 0 else GROUP
    HELD: gl.constexpr = SLICE // RUN
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, WARPS // SLICES, 1], [1, 16, 8])
    pair: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if GROUP > 0:
        keep(scales, scale_smem, low * BLOCK_I // RUN, tile, O, G, GROUPS, BLOCK_O, PARTS, SLICES, HELD, CHUNK, WARPS)
        scale_smem = scale_smem._reinterpret(gl.float32, [GROUPS // SLICES, SLICES, BLOCK_O], pair)
    if HAS_ZEROS:
        keep(zeros, zero_smem, low * BLOCK_I // RUN, tile, O, G, GROUPS, BLOCK_O, PARTS, SLICES, HELD, CHUNK, WARPS)
        zero_smem = zero_smem._reinterpret(gl.float32, [GROUPS // SLICES, SLICES, BLOCK_O], pair)
    if GROUP > 0 or HAS_ZEROS:
        _barrier()
    out: gl.constexpr = gl.SliceLayout(0, layout)
    row_scale = scales_of_rows(scales, tile, O, GROUP, BLOCK_O, PARTS, out)
    pairs: gl.constexpr = gl.DotOperandLayout(0, layout, 1)
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    other_acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    zero = gl.zeros([SLICES, BLOCK_O], gl.float32, gl.SliceLayout(2, left))
    mbarrier.wait(full_w.index(0), 0)
    codes = w_cubes.index(0).load(pairs)
    cube: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    if ONE:
        if PDL:
            _wait_for_the_kernel_in_front()
            _let_the_next_kernel_start()
        x_places = row_of_x(x, x_smem, low, I, A_WORD, SLICES, TIMES, WARPS)
    else:
        x_places = x_smem._reinterpret(gl.bfloat16, [STAGES * A_WORD, SLICES, ROWS, 64], cube)
    slot = 0
    phase = 0
    for k in range(steps):
        if not ONE:
            mbarrier.wait(full_x.index(slot), phase)
        columns = columns_of(x_places, (k if ONE else slot) * A_WORD, A_WORD, SLICES, N, ONE, right)
        if k + STAGES < steps:
            mbarrier.arrive(empty.index(slot), count=1)
        goes_on = k + 1 < steps
        wraps = slot + 1 == STAGES
        slot = gl.where(goes_on, gl.where(wraps, 0, slot + 1), slot)
        phase = gl.where(goes_on & wraps, phase ^ 1, phase)
        mbarrier.wait(full_w.index(slot), phase)
        next_codes = w_cubes.index(slot).load(pairs)
        for n in gl.static_range(A_WORD):
            if HAS_ZEROS:
                if n % (RUN // 64) == 0:
                    zero = zero_smem.index(k * HELD + n * 64 // RUN).load(gl.SliceLayout(2, left))
            numbers = numbers_of(piece_of(codes, n, A_WORD, left), zero, layout, KIND, HAS_ZEROS, 64)
            if GROUP > 0:
                part = mma_v2(numbers, columns[n], gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout))
                acc += part * scale_smem.index(k * HELD + n * 64 // RUN).load(gl.SliceLayout(2, layout))[:, :, None]
            elif n % 2 == 0:
                acc = mma_v2(numbers, columns[n], acc)
            else:
                other_acc = mma_v2(numbers, columns[n], other_acc)
        codes = next_codes
    total = gl.sum(acc + other_acc, axis=0)
    complete(
        total, out, row_scale, bias, y, partials, arrivals, tile, tile, 0, split, T, O, GROUP, N, BLOCK_O, SPLITS, PARTS, HAS_BIAS,
        WARPS,
    )


@gluon.jit(do_not_specialize=["T"])
def ws_sliced_kernel(
    x, x_tiles, code_tiles, scales, zeros, bias, y, partials, arrivals, T, O, I, G,
    KIND: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, HAS_ZEROS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_O: gl.constexpr, SLICES: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    STEPS: gl.constexpr, LOADER_REGS: gl.constexpr,
    PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, CHUNK: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    SLICE: gl.constexpr = 64 * A_WORD
    BLOCK_I: gl.constexpr = SLICES * SLICE
    ONE: gl.constexpr = ROWS == 1
    TIMES: gl.constexpr = (STEPS * BLOCK_I + 256 * num_warps - 1) // (256 * num_warps)
    tile = gl.program_id(0)
    split = gl.program_id(1)
    all_steps = gl.cdiv(I, BLOCK_I)
    low = all_steps * split // SPLITS
    steps = all_steps * (split + 1) // SPLITS - low
    first_o = tile * (BLOCK_O // PARTS // 8)
    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES, SLICES, BLOCK_O // PARTS // 8, PARTS, 8, 64], code_tiles.layout)
    full_w = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_x = empty
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
    pair: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scale_smem = full_w
    zero_smem = full_w
    if GROUP > 0:
        scale_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], pair)
    if HAS_ZEROS:
        zero_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_O], pair)
    _barrier()
    twos: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    w_cubes = w_smem._reinterpret(gl.int32, [STAGES, SLICES, BLOCK_O, 32], twos)
    gl.warp_specialize(
        [
            (sliced_consumer, (x, x_smem, w_cubes, scale_smem, zero_smem, full_w, full_x, empty, scales, zeros, bias, y, partials,
                               arrivals, tile, split, low, steps, T, O, I, G, KIND, GROUP, GROUPS, HAS_ZEROS, ROWS, BLOCK_O,
                               SLICES, SPLITS, STAGES, TIMES, PARTS, HAS_BIAS, CHUNK, PDL, num_warps, False)),
            (sliced_loader, (x_tiles, code_tiles, x_smem, w_smem, full_w, full_x, empty, first_o, low, steps, BLOCK_O, SLICES,
                             A_WORD, ROWS, STAGES, PDL)),
        ],
        [1], [LOADER_REGS],
    )


def launch_sliced(x_TI, weight, bias_O, gated, tiles):
    """tiles: block_t, block_o, splits, warps, stages, slices, maxnreg"""
    block_t, block_o, splits, warps, stages, slices, maxnreg = tiles
    (T, I), rows = x_TI.shape, weight.codes_OJ.shape[0]
    O, parts = (rows // 2, 2) if gated else (rows, 1)
    a_word = codes_a_word(weight.kind)
    width = 64 * a_word
    programs = triton.cdiv(rows, block_o)
    y_TO = x_TI.new_empty(T, O)
    partials = arrivals = y_TO
    if splits > 1:
        assert programs <= ARRIVALS
        partials = x_TI.new_empty(programs, splits, block_o, max(8, block_t), dtype=torch.float32)
        arrivals = arrivals_of(x_TI.device)
    scales_OG = weight.scales_OG
    zeros_OG = scales_OG if weight.zeros_OG is None else weight.zeros_OG
    words_OJ = weight.codes_OJ.view(torch.int16)
    J = words_OJ.shape[1]
    codes = TensorDescriptor(words_OJ, [J // 64, O // EIGHT, parts, EIGHT, 64], [64, EIGHT * J, O * J, J, 1], [slices, block_o // parts // EIGHT, parts, EIGHT, 64], _layout(64, 5))
    x_tiles = codes if block_t == 1 else TensorDescriptor(x_TI, [a_word, I // width, T, 64], [64, width, x_TI.stride(0), 1], [a_word, slices, block_t, 64], _layout(64, 4))
    more = {"maxnreg": maxnreg} if maxnreg else {}
    steps = triton.cdiv(triton.cdiv(I, slices * width), splits)
    return ws_sliced_kernel[(programs, splits)](
        x_TI, x_tiles, codes, scales_OG, zeros_OG, scales_OG if bias_O is None else bias_O, y_TO, partials, arrivals, T, O, I, scales_OG.shape[1],
        KIND=weight.kind, GROUP=weight.group, GROUPS=kept_groups(I, weight.group, slices * width, splits), HAS_ZEROS=weight.zeros_OG is not None,
        ROWS=block_t, BLOCK_O=block_o, SLICES=slices, SPLITS=splits, STAGES=stages, STEPS=steps if block_t == 1 else 0, LOADER_REGS=24,
        PARTS=parts, HAS_BIAS=bias_O is not None, CHUNK=CHUNK, num_warps=warps, **more, **chained(x_TI.device),
    ), y_TO
