"""A product of many rows, written in Gluon for Hopper GPUs, in which the SMs share the work evenly.

Groups of four warps multiply, each 64 rows of one matrix with all rows of the program's tile of the other one, so that a step
of a program reads each element from L2 once.  Tiles come by the GPU's copy engine (TMA); the first group asks for them, several
steps ahead, and for the first weights before the product's input exists (specdec/ops/launch.py).

A program computes whole tiles, and its part of those tiles that are left over when all programs have as many whole ones.  The
steps of the tiles that are left over lie in one long row, of which every program gets an equal piece.  So a piece may be the
end of one tile and the start of the next.  The programs of a shared tile leave their sums in memory, and each adds up a part of
the tile, in the order of the programs.  A program waits there for the others.  So they must all run at once: there may be no
more of them than SMs, and no second stream may launch such a product.

This module knows no model's shapes and chooses no tiles.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec.ops.launch import chained
from specdec.ops.products.linear_hopper import (
    EIGHT,
    _barrier,
    _fetch,
    _layout,
    _let_the_next_kernel_start,
    _wait_for_the_kernel_in_front,
)
from specdec.ops.products.linear_hopper import _finish as _finish_transposed
from specdec.ops.products.linear_triton import ARRIVALS, arrivals_of

if TYPE_CHECKING:
    from specdec.ops.products.tiles import ProductTiles

GROUP = 64  # rows that one group of four warps multiplies
REGISTERS = {4: 248, 8: 248, 12: 168, 16: 128}  # of a thread, by the number of warps: an SM has 65,536


@gluon.jit
def _place(f, first, piece, program, programs, shared, K):
    """The tile, and the step in it, of a program's f-th step.  Its piece of the shared tiles comes before its whole tiles."""
    in_piece = f < piece
    step = gl.where(in_piece, first + f, f - piece)
    tile = step // K
    return gl.where(in_piece, tile, shared + tile * programs + program), step - tile * K


@gluon.jit
def _load_weight(
    w_tiles, w_smem, full, slot, block, at, pred,
    GROUPS: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr, X_FIRST: gl.constexpr,
):  # fmt: skip
    if X_FIRST:
        _fetch(w_tiles, [0, block * (BLOCK // PARTS), at], full.index(slot), w_smem.index(slot), pred=pred)
    else:
        for g in gl.static_range(GROUPS):
            of_eight = (block * GROUPS + g) * (8 // PARTS)
            _fetch(w_tiles, [of_eight, 0, 0, at], full.index(slot), w_smem.index(slot * GROUPS + g), pred=pred)


@gluon.jit
def _load_x(x_tiles, x_smem, full, slot, block, at, pred, GROUPS: gl.constexpr, BLOCK: gl.constexpr, X_FIRST: gl.constexpr):
    if X_FIRST:
        for g in gl.static_range(GROUPS):
            _fetch(x_tiles, [(block * GROUPS + g) * 64, at], full.index(slot), x_smem.index(slot * GROUPS + g), pred=pred)
    else:
        _fetch(x_tiles, [block * BLOCK, at], full.index(slot), x_smem.index(slot), pred=pred)


@gluon.jit
def _multiply(
    x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, whole, shared, K, of_t,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, BLOCK_I: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, X_FIRST: gl.constexpr, SHARED: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What group WHICH does: it multiplies rows WHICH * 64 to WHICH * 64 + 63 of each tile.  Group 0 also asks for tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BYTES: gl.constexpr = (GROUPS * 64 + BLOCK) * BLOCK_I * 2  # of a stage
    program, programs = gl.program_id(0), gl.num_programs(0)
    first = shared * K * program // programs
    piece = shared * K * (program + 1) // programs - first
    steps = piece + gl.cdiv(gl.maximum(whole - program, 0), programs) * K
    if WHICH == 0:
        for s in gl.static_range(STAGES):
            tile, k = _place(s, first, piece, program, programs, shared, K)
            mbarrier.expect(full.index(s), BYTES, pred=s < steps)
            _load_weight(w_tiles, w_smem, full, s, tile // of_t, k * BLOCK_I, s < steps, GROUPS, BLOCK, PARTS, X_FIRST)
    if PDL:
        _wait_for_the_kernel_in_front()
        _let_the_next_kernel_start()
    if WHICH == 0:
        for s in gl.static_range(STAGES):
            tile, k = _place(s, first, piece, program, programs, shared, K)
            _load_x(x_tiles, x_smem, full, s, tile % of_t, k * BLOCK_I, s < steps, GROUPS, BLOCK, X_FIRST)
    slot, before = 0, STAGES - 1  # of this step, and of the one before it
    phase = 0
    f = 0
    part = 0  # of a shared tile: 0, or 1 if this program has the end of one and the start of the next
    while f < steps:
        tile, low = _place(f, first, piece, program, programs, shared, K)
        n = gl.minimum(K - low, gl.where(f < piece, piece - f, K))
        acc = gl.zeros([64, BLOCK], gl.float32, layout)
        for k in range(n):
            mbarrier.wait(full.index(slot), phase)
            if X_FIRST:
                left = x_smem.index(slot * GROUPS + WHICH)
                right = w_smem.index(slot)._reinterpret(w_smem.dtype, [BLOCK, BLOCK_I], flat)
            else:
                left = w_smem.index(slot * GROUPS + WHICH)._reinterpret(w_smem.dtype, [64, BLOCK_I], flat)
                right = x_smem.index(slot)
            acc = warpgroup_mma(left, right.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            if WHICH == 0:  # the stage of the step before is filled again once all groups have read it
                to = f + k - 1 + STAGES
                more = (f + k > 0) & (to < steps)
                to_tile, to_k = _place(to, first, piece, program, programs, shared, K)
                at = to_k * BLOCK_I
                mbarrier.wait(empty.index(before), gl.where(slot == 0, phase ^ 1, phase), pred=more)
                mbarrier.expect(full.index(before), BYTES, pred=more)
                _load_weight(w_tiles, w_smem, full, before, to_tile // of_t, at, more, GROUPS, BLOCK, PARTS, X_FIRST)
                _load_x(x_tiles, x_smem, full, before, to_tile % of_t, at, more, GROUPS, BLOCK, X_FIRST)
            before = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        if SHARED and n < K:
            _leave(acc, layout, partials, arrivals, program * 2 + part, tile, WHICH, GROUPS, BLOCK)
        else:
            _finish(acc, layout, bias, y, tile, of_t, T, O, WHICH, GROUPS, BLOCK, PARTS, X_FIRST, HAS_BIAS)
        f += n
        part += 1
    if SHARED:
        f = piece * 0
        while f < piece:
            tile, low = _place(f, first, piece, program, programs, shared, K)
            n = gl.minimum(K - low, piece - f)
            if n < K:
                _add_up(
                    partials, arrivals, bias, y, tile, of_t, program, programs, shared, K, T, O,
                    WHICH, GROUPS, BLOCK, PARTS, X_FIRST, HAS_BIAS,
                )  # fmt: skip
            f += n


@gluon.jit
def _leave(
    acc, layout: gl.constexpr, partials, arrivals, part, tile,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Writes a group's sums of a part of a shared tile, and counts its arrival."""
    mine = partials + (part * GROUPS + WHICH).to(gl.int64) * (64 * BLOCK)
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    c = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    gl.store(mine + r[:, None] * BLOCK + c[None, :], acc)
    _barrier()  # all of this group's stores before its arrival
    gl.atomic_add(arrivals + tile * GROUPS + WHICH, 1, sem="release", scope="gpu")


@gluon.jit
def _add_up(
    partials, arrivals, bias, y, tile, of_t, program, programs, shared, K, T, O,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr, X_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Adds up this program's columns of a tile: every n-th 32 for n programs.  The last to leave sets the counter to zero."""
    steps = shared * K
    one = ((tile * K + 1) * programs - 1) // steps  # the first of the tile's programs
    n = ((tile * K + K) * programs - 1) // steps - one + 1
    counter = arrivals + tile * GROUPS + WHICH
    while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") % 65536 < n:
        pass
    _barrier()  # one thread has seen all arrivals; now all may read
    BOTH: gl.constexpr = X_FIRST and PARTS == 2  # columns of the gate's half, and as many of up's
    N: gl.constexpr = 16 if BOTH else 32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    c = gl.arange(0, N, gl.SliceLayout(0, layout))
    zeros = gl.zeros([64, N], gl.int32, layout)
    for number in range(program - one, BLOCK // 32, n):
        acc = gl.zeros([64, N], gl.float32, layout)
        up = acc
        at = r[:, None] * BLOCK + (number * N + c)[None, :]
        for first in range(0, n, 4):
            for ahead in gl.static_range(4):
                which = one + first + ahead
                part = which * 2 + gl.where(steps * which // programs < tile * K, 1, 0)  # it began in the tile before
                theirs = partials + (part * GROUPS + WHICH).to(gl.int64) * (64 * BLOCK)
                exists = zeros + first + ahead < n
                acc += gl.load(theirs + at, mask=exists, other=0.0, cache_modifier=".cg")  # this SM's L1 may hold old data
                if BOTH:
                    up += gl.load(theirs + at + BLOCK // 2, mask=exists, other=0.0, cache_modifier=".cg")
        if X_FIRST:
            first_o = tile // of_t * (BLOCK // PARTS) + number * N
            _store(acc, up, bias, y, first_o, (tile % of_t * GROUPS + WHICH) * 64, T, O, N, PARTS, HAS_BIAS)
        else:
            first_t = tile % of_t * BLOCK + number * N
            _finish_transposed(acc, layout, bias, y, tile // of_t * GROUPS + WHICH, first_t, T, O, N, 64, PARTS, HAS_BIAS)
    _barrier()
    if gl.atomic_add(counter, 65536, sem="acq_rel", scope="gpu") // 65536 == n - 1:
        gl.store(counter, 0)


@gluon.jit
def _finish(
    acc, layout: gl.constexpr, bias, y, tile, of_t, T, O,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr, X_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Stores a group's part of a whole tile."""
    if X_FIRST:
        first_o = tile // of_t * (BLOCK // PARTS)
        first_t = (tile % of_t * GROUPS + WHICH) * 64
        if PARTS == 2:
            gate, up = gl.split(gl.permute(gl.reshape(acc, [64, 2, BLOCK // 2]), (0, 2, 1)))
            _store(gate, up, bias, y, first_o, first_t, T, O, BLOCK // 2, PARTS, HAS_BIAS)
        else:
            _store(acc, acc, bias, y, first_o, first_t, T, O, BLOCK, PARTS, HAS_BIAS)
    else:
        eights = tile // of_t * GROUPS + WHICH
        _finish_transposed(acc, layout, bias, y, eights, tile % of_t * BLOCK, T, O, BLOCK, 64, PARTS, HAS_BIAS)


@gluon.jit
def _store(
    acc, up, bias, y, first_o, first_t, T, O,
    N: gl.constexpr, PARTS: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Adds the bias, applies SiLU-mul if gated, rounds once and stores 64 rows of N columns.  up: of a gated product."""
    layout: gl.constexpr = acc.type.layout
    t = first_t + gl.arange(0, 64, gl.SliceLayout(1, layout))
    out_O = first_o + gl.arange(0, N, gl.SliceLayout(0, layout))
    if HAS_BIAS:
        acc += gl.load(bias + out_O, mask=out_O < O, other=0.0).to(gl.float32)[None, :]
        if PARTS == 2:
            up += gl.load(bias + O + out_O, mask=out_O < O, other=0.0).to(gl.float32)[None, :]
    if PARTS == 2:
        acc = acc / (1 + gl.exp(-acc)) * up
    ok = (t < T)[:, None] & (out_O < O)[None, :]
    gl.store(y + t.to(gl.int64)[:, None] * O + out_O[None, :], acc.to(y.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=["T", "whole", "shared", "of_t"])  # for the reason given at linear_kernel
def many_linear_kernel(
    x_tiles,  # tiles of x [T, I]: [64, BLOCK_I] if X_FIRST, or [BLOCK, BLOCK_I]
    w_tiles,  # tiles of the weight: [PARTS, BLOCK / PARTS, BLOCK_I] of [PARTS, O, I], or as in linear_hopper.py
    bias,  # [PARTS * O]
    y,  # [T, O]
    partials,  # [programs, 2, GROUPS, 64, BLOCK] float32
    arrivals,  # [shared tiles, GROUPS] int32, zero before and after
    T, O, K, whole, shared, of_t,
    BLOCK: gl.constexpr, BLOCK_I: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    X_FIRST: gl.constexpr, SHARED: gl.constexpr, REGISTERS: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """K: steps of a tile.  whole, shared: tiles that one program computes, and those that programs share.  of_t: tiles of x.

    X_FIRST: whether groups divide a tile's rows of x, rather than those of the weight.  REGISTERS: of a thread.
    """
    if X_FIRST:
        x_smem = gl.allocate_shared_memory(x_tiles.dtype, [STAGES * GROUPS, 64, BLOCK_I], x_tiles.layout)
        w_smem = gl.allocate_shared_memory(w_tiles.dtype, [STAGES, PARTS, BLOCK // PARTS, BLOCK_I], w_tiles.layout)
    else:
        x_smem = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, BLOCK, BLOCK_I], x_tiles.layout)
        w_smem = gl.allocate_shared_memory(w_tiles.dtype, [STAGES * GROUPS, 8 // PARTS, PARTS, 8, BLOCK_I], w_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    # A tuple that has a name would turn constants into tensors, so each group's arguments are written out.
    if GROUPS == 2:
        gl.warp_specialize([
            (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, whole, shared, K,
                         of_t, 0, GROUPS, BLOCK, BLOCK_I, PARTS, STAGES, X_FIRST, SHARED, HAS_BIAS, PDL)),
            (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, whole, shared, K,
                         of_t, 1, GROUPS, BLOCK, BLOCK_I, PARTS, STAGES, X_FIRST, SHARED, HAS_BIAS, PDL)),
        ], [4], [REGISTERS])  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize([
            (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, whole, shared, K,
                         of_t, 0, GROUPS, BLOCK, BLOCK_I, PARTS, STAGES, X_FIRST, SHARED, HAS_BIAS, PDL)),
            (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, whole, shared, K,
                         of_t, 1, GROUPS, BLOCK, BLOCK_I, PARTS, STAGES, X_FIRST, SHARED, HAS_BIAS, PDL)),
            (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, whole, shared, K,
                         of_t, 2, GROUPS, BLOCK, BLOCK_I, PARTS, STAGES, X_FIRST, SHARED, HAS_BIAS, PDL)),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    elif GROUPS == 4:
        gl.warp_specialize([
            (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, whole, shared, K,
                         of_t, 0, GROUPS, BLOCK, BLOCK_I, PARTS, STAGES, X_FIRST, SHARED, HAS_BIAS, PDL)),
            (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, whole, shared, K,
                         of_t, 1, GROUPS, BLOCK, BLOCK_I, PARTS, STAGES, X_FIRST, SHARED, HAS_BIAS, PDL)),
            (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, whole, shared, K,
                         of_t, 2, GROUPS, BLOCK, BLOCK_I, PARTS, STAGES, X_FIRST, SHARED, HAS_BIAS, PDL)),
            (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, whole, shared, K,
                         of_t, 3, GROUPS, BLOCK, BLOCK_I, PARTS, STAGES, X_FIRST, SHARED, HAS_BIAS, PDL)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip


class Division(NamedTuple):
    """How a product's tiles are divided.  steps: of a tile.  whole, shared: tiles that one program computes, and those that all
    programs share.  of_t: tiles of x for each tile of the weight.
    """

    programs: int
    steps: int
    whole: int
    shared: int
    of_t: int


@cache
def division(T: int, rows: int, I: int, tiles: ProductTiles) -> Division:
    """The division for T rows of x and a weight [rows, I].  Tiles are shared only if every program gets a step of them."""
    of_t, steps = triton.cdiv(T, tiles.block_t), triton.cdiv(I, tiles.block_i)
    number = triton.cdiv(rows, tiles.block_o) * of_t
    shared = number % tiles.programs if tiles.splits > 1 else 0
    if shared * steps < tiles.programs:
        return Division(min(tiles.programs, number), steps, number, 0, of_t)
    return Division(tiles.programs, steps, number - shared, shared, of_t)


def launch_many_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    """[T, O], or [T, F] if gated.  Rows of x and of the weight must start at multiples of 16 bytes, and O be one of 8.

    Groups divide x if tiles.block_t is 64 for every four warps, and else the weight.
    """
    (T, I), rows = x_TI.shape, weight_OI.shape[0]
    O, parts = (rows // 2, 2) if gated else (rows, 1)
    groups = tiles.warps // 4
    x_first = tiles.block_t == GROUP * groups
    block = tiles.block_o if x_first else tiles.block_t
    assert T > 0 and weight_OI.shape[1] == I and weight_OI.is_contiguous() and x_TI.stride(1) == 1 and O % EIGHT == 0
    assert x_TI.dtype == weight_OI.dtype and x_TI.element_size() == 2 and (bias_O is None or bias_O.shape == (rows,))
    assert x_first or tiles.block_o == GROUP * groups
    each = division(T, rows, I, tiles)
    y_TO = x_TI.new_empty(T, O)
    partials = arrivals = y_TO
    if each.shared:
        assert each.shared * groups <= ARRIVALS and each.programs <= sms(x_TI.device)
        partials = x_TI.new_empty(each.programs, 2, groups, GROUP, block, dtype=torch.float32)
        arrivals = arrivals_of(x_TI.device)
    many_linear_kernel[(each.programs,)](
        _tiles_of_x(x_TI, GROUP if x_first else block, tiles), _tiles_of_weight(weight_OI, parts, x_first, tiles),
        weight_OI if bias_O is None else bias_O, y_TO, partials, arrivals, T, O, each.steps, each.whole, each.shared, each.of_t,
        BLOCK=block, BLOCK_I=tiles.block_i, PARTS=parts, STAGES=tiles.stages, GROUPS=groups, X_FIRST=x_first,
        SHARED=each.shared > 0, REGISTERS=REGISTERS[tiles.warps], HAS_BIAS=bias_O is not None, num_warps=4,
        maxnreg=REGISTERS[tiles.warps], **chained(x_TI.device),
    )  # fmt: skip
    return y_TO


def _tiles_of_x(x_TI: Tensor, rows: int, tiles: ProductTiles) -> TensorDescriptor:
    """The copy engine's descriptor of tiles of `rows` rows of x."""
    return TensorDescriptor(x_TI, list(x_TI.shape), [x_TI.stride(0), 1], [rows, tiles.block_i], _layout(2))


def _tiles_of_weight(weight_OI: Tensor, parts: int, x_first: bool, tiles: ProductTiles) -> TensorDescriptor:
    """The copy engine's descriptor of a weight's tiles: all rows of a part one after another, or 8 of each part in turn."""
    rows, I = weight_OI.shape
    O = rows // parts
    if x_first:
        return TensorDescriptor(
            weight_OI, [parts, O, I], [O * I, I, 1], [parts, tiles.block_o // parts, tiles.block_i], _layout(3)
        )
    shape, strides = [O // EIGHT, parts, EIGHT, I], [EIGHT * I, O * I, I, 1]
    return TensorDescriptor(weight_OI, shape, strides, [GROUP // EIGHT // parts, parts, EIGHT, tiles.block_i], _layout(4))


@cache
def sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
