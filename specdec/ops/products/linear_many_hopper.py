"""A product of 65 rows or more, written in Gluon for Hopper GPUs, by groups of warps with a job each.

One warp of a program asks the GPU's copy engine (TMA) for tiles; the other groups of four warps multiply, each 64 rows of x with
the program's whole tile of the weight.  So a tile of the weight and one of x are read once from L2 for up to 192 x 256 results.

The SMs share the work evenly.  Whole tiles that fill all programs are each computed by one program; the steps of the tiles that
are left are divided among all programs in one long row, so that a program gets the end of one tile and the start of the next.
Programs of a shared tile write their sums in float32, and each adds up a part of the tile's columns, always in the same order.

This module knows no model's shapes and chooses no tiles.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec.ops.launch import chained
from specdec.ops.products.linear_hopper import _finish as _finish_weight

if TYPE_CHECKING:
    from specdec.ops.products.tiles import ProductTiles

GROUP = 64  # rows of x that one group of four warps multiplies
REGISTERS = {1: 248, 2: 248, 3: 168, 4: 128}  # of a thread, by the number of groups

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _wait_for_the_kernel_in_front():
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _let_the_next_kernel_start():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _place(f, first, ours, program, programs, shared, K):
    """The tile, and the step in it, of a program's f-th step: its part of shared tiles comes first, and then its whole tiles."""
    in_shared = f < ours
    g = gl.where(in_shared, first + f, f - ours)
    tile = g // K
    return gl.where(in_shared, tile, shared + tile * programs + program), g - tile * K


@gluon.jit
def _load_weight(
    w_tiles, w_smem, full, slot, block, at, pred,
    GROUPS: gl.constexpr, BLOCK_B: gl.constexpr, PARTS: gl.constexpr, SWAP: gl.constexpr,
):  # fmt: skip
    if SWAP:
        for g in gl.static_range(GROUPS):
            _fetch(w_tiles, [(block * GROUPS + g) * (8 // PARTS), 0, 0, at], full.index(slot), w_smem.index(slot * GROUPS + g), pred=pred)
    else:
        _fetch(w_tiles, [0, block * (BLOCK_B // PARTS), at], full.index(slot), w_smem.index(slot), pred=pred)


@gluon.jit
def _load_x(
    x_tiles, x_smem, full, slot, block, at, pred, GROUPS: gl.constexpr, BLOCK_B: gl.constexpr, SWAP: gl.constexpr,
):  # fmt: skip
    if SWAP:
        _fetch(x_tiles, [block * BLOCK_B, at], full.index(slot), x_smem.index(slot), pred=pred)
    else:
        for g in gl.static_range(GROUPS):
            _fetch(x_tiles, [(block * GROUPS + g) * 64, at], full.index(slot), x_smem.index(slot * GROUPS + g), pred=pred)


@gluon.jit
def _multiply(
    x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_I: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, SWAP: gl.constexpr, SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The job of a group of warps that multiplies rows WHICH * 64 to WHICH * 64 + 63 of every tile of x.

    The first group also loads, for all.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_B, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BYTES: gl.constexpr = (GROUPS * 64 + BLOCK_B) * BLOCK_I * 2
    OUTS: gl.constexpr = BLOCK_B // PARTS
    program, programs = gl.program_id(0), gl.num_programs(0)
    first = shared * K * program // programs
    ours = shared * K * (program + 1) // programs - first
    total = ours + gl.cdiv(gl.maximum(plain - program, 0), programs) * K
    if WHICH == 0:
        for s in gl.static_range(STAGES):
            tile, k = _place(s, first, ours, program, programs, shared, K)
            mbarrier.expect(full.index(s), BYTES, pred=s < total)
            _load_weight(w_tiles, w_smem, full, s, tile // of_t, k * BLOCK_I, s < total, GROUPS, BLOCK_B, PARTS, SWAP)
    if PDL:
        _wait_for_the_kernel_in_front()
        _let_the_next_kernel_start()
    if WHICH == 0:
        for s in gl.static_range(STAGES):
            tile, k = _place(s, first, ours, program, programs, shared, K)
            _load_x(x_tiles, x_smem, full, s, tile % of_t, k * BLOCK_I, s < total, GROUPS, BLOCK_B, SWAP)
    slot = 0
    phase = 0
    before = STAGES - 1  # the slot of the step before
    f = 0
    item = 0
    while f < total:
        tile, low = _place(f, first, ours, program, programs, shared, K)
        n = gl.minimum(K - low, gl.where(f < ours, ours - f, K))
        acc = gl.zeros([64, BLOCK_B], gl.float32, layout)
        for k in range(n):
            mbarrier.wait(full.index(slot), phase)
            if SWAP:
                first_of = w_smem.index(slot * GROUPS + WHICH)._reinterpret(w_smem.dtype, [64, BLOCK_I], flat)
                second = x_smem.index(slot)
            else:
                first_of = x_smem.index(slot * GROUPS + WHICH)
                second = w_smem.index(slot)._reinterpret(w_smem.dtype, [BLOCK_B, BLOCK_I], flat)
            acc = warpgroup_mma(first_of, second.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            if WHICH == 0:  # fills the stage that all groups have read
                to = f + k - 1 + STAGES
                more = (f + k > 0) & (to < total)
                to_tile, to_k = _place(to, first, ours, program, programs, shared, K)
                mbarrier.wait(empty.index(before), phase ^ (slot == 0).to(gl.int32), pred=more)
                mbarrier.expect(full.index(before), BYTES, pred=more)
                _load_weight(
                    w_tiles, w_smem, full, before, to_tile // of_t, to_k * BLOCK_I, more, GROUPS, BLOCK_B, PARTS, SWAP
                )
                _load_x(x_tiles, x_smem, full, before, to_tile % of_t, to_k * BLOCK_I, more, GROUPS, BLOCK_B, SWAP)
            before = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        if SPLIT and n < K:
            _leave(acc, layout, partials, arrivals, program, item, tile, WHICH, GROUPS, BLOCK_B, SPLIT)
        else:
            if SWAP:
                _finish_weight(
                    acc, layout, bias, y, tile // of_t * GROUPS + WHICH, tile % of_t * BLOCK_B, T, O, BLOCK_B, 64, PARTS, HAS_BIAS
                )
            else:
                first_t = (tile % of_t * GROUPS + WHICH) * 64
                _finish(acc, layout, bias, y, tile // of_t * OUTS, first_t, T, O, BLOCK_B, PARTS, HAS_BIAS)
        f += n
        item += 1
    if SPLIT:
        f = ours * 0
        while f < ours:
            tile, low = _place(f, first, ours, program, programs, shared, K)
            n = gl.minimum(K - low, ours - f)
            if n < K:
                _sum(
                    partials, arrivals, bias, y, tile, program, programs, shared, K, of_t, T, O,
                    WHICH, GROUPS, BLOCK_B, PARTS, SWAP, HAS_BIAS,
                )  # fmt: skip
            f += n


@gluon.jit
def _leave(
    acc, layout: gl.constexpr, partials, arrivals, program, item, tile,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, BLOCK_B: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    if SPLIT:
        mine = partials + ((program * 2 + item) * GROUPS + WHICH).to(gl.int64) * (64 * BLOCK_B)
        r = gl.arange(0, 64, gl.SliceLayout(1, layout))
        c = gl.arange(0, BLOCK_B, gl.SliceLayout(0, layout))
        gl.store(mine + r[:, None] * BLOCK_B + c[None, :], acc)
        _barrier()  # all of this group's stores before its arrival
        gl.atomic_add(arrivals + tile * GROUPS + WHICH, 1, sem="release", scope="gpu")


@gluon.jit
def _sum(
    partials, arrivals, bias, y, tile, program, programs, shared, K, of_t, T, O,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, BLOCK_B: gl.constexpr, PARTS: gl.constexpr, SWAP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Adds up this program's share of a tile's columns: every n-th piece of 32, in the order of the tile's programs.  The program
    waits for the others, which all run: there are no more of them than SMs.  The last one to leave sets the counter to zero.
    """
    steps = shared * K
    one = ((tile * K + 1) * programs - 1) // steps
    n = ((tile * K + K) * programs - 1) // steps - one + 1
    counter = arrivals + tile * GROUPS + WHICH
    while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") % 65536 < n:
        pass
    _barrier()
    WIDE: gl.constexpr = 32 if SWAP else 32 // PARTS
    AT_ONCE: gl.constexpr = 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    c = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    zeros = gl.zeros([64, WIDE], gl.int32, layout)
    for piece in range(program - one, BLOCK_B // 32, n):
        acc = gl.zeros([64, WIDE], gl.float32, layout)
        up = gl.zeros([64, WIDE], gl.float32, layout)
        at = r[:, None] * BLOCK_B + (piece * WIDE + c)[None, :]
        for s0 in range(0, n, AT_ONCE):
            for ds in gl.static_range(AT_ONCE):
                s = s0 + ds
                other = gl.where(steps * (one + s) // programs < tile * K, 1, 0)  # this tile is that program's second one
                theirs = partials + (((one + s) * 2 + other) * GROUPS + WHICH).to(gl.int64) * (64 * BLOCK_B)
                acc += gl.load(theirs + at, mask=zeros + s < n, other=0.0, cache_modifier=".cg")
                if PARTS == 2 and not SWAP:
                    up += gl.load(theirs + at + BLOCK_B // 2, mask=zeros + s < n, other=0.0, cache_modifier=".cg")
        if SWAP:
            _finish_weight(
                acc, layout, bias, y, tile // of_t * GROUPS + WHICH, tile % of_t * BLOCK_B + piece * WIDE, T, O, WIDE, 64, PARTS,
                HAS_BIAS,
            )  # fmt: skip
        else:
            t = (tile % of_t * GROUPS + WHICH) * 64 + r
            out_O = tile // of_t * (BLOCK_B // PARTS) + piece * WIDE + c
            if HAS_BIAS:
                acc += gl.load(bias + out_O, mask=out_O < O, other=0.0).to(gl.float32)[None, :]
                if PARTS == 2:
                    up += gl.load(bias + O + out_O, mask=out_O < O, other=0.0).to(gl.float32)[None, :]
            if PARTS == 2:
                acc = acc / (1 + gl.exp(-acc)) * up
            ok = (t < T)[:, None] & (out_O < O)[None, :]
            gl.store(y + t.to(gl.int64)[:, None] * O + out_O[None, :], acc.to(y.dtype.element_ty), mask=ok)
    _barrier()
    # every program of the tile leaves once: 65536 counts those that have read all
    if gl.atomic_add(counter, 65536, sem="acq_rel", scope="gpu") // 65536 == n - 1:
        gl.store(counter, 0)


@gluon.jit
def _finish(
    acc, layout: gl.constexpr, bias, y, first_o, first_t, T, O, BLOCK_B: gl.constexpr, PARTS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Adds the bias, applies SiLU-mul if gated, rounds once and stores 64 rows of y."""
    OUTS: gl.constexpr = BLOCK_B // PARTS
    if PARTS == 2:
        gate, up = gl.split(gl.permute(gl.reshape(acc, [64, 2, OUTS]), (0, 2, 1)))
        out: gl.constexpr = gate.type.layout
        c = gl.arange(0, OUTS, gl.SliceLayout(0, out))
        if HAS_BIAS:
            gate += gl.load(bias + first_o + c, mask=first_o + c < O, other=0.0).to(gl.float32)[None, :]
            up += gl.load(bias + O + first_o + c, mask=first_o + c < O, other=0.0).to(gl.float32)[None, :]
        acc = gate / (1 + gl.exp(-gate)) * up
        t = first_t + gl.arange(0, 64, gl.SliceLayout(1, out))
        ok = (t < T)[:, None] & (first_o + c < O)[None, :]
        gl.store(y + t.to(gl.int64)[:, None] * O + (first_o + c)[None, :], acc.to(y.dtype.element_ty), mask=ok)
    else:
        c = gl.arange(0, OUTS, gl.SliceLayout(0, layout))
        if HAS_BIAS:
            acc += gl.load(bias + first_o + c, mask=first_o + c < O, other=0.0).to(gl.float32)[None, :]
        t = first_t + gl.arange(0, 64, gl.SliceLayout(1, layout))
        ok = (t < T)[:, None] & (first_o + c < O)[None, :]
        gl.store(y + t.to(gl.int64)[:, None] * O + (first_o + c)[None, :], acc.to(y.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=["T", "plain", "shared", "of_t"])
def many_linear_kernel(
    x_tiles,  # tiles [64, BLOCK_I] of x [T, I]
    w_tiles,  # tiles [PARTS, BLOCK_B / PARTS, BLOCK_I] of the weight as [PARTS, O, I]
    bias,  # [PARTS * O]
    y,  # [T, O]
    partials,  # [programs, 2, GROUPS, 64, BLOCK_B] float32
    arrivals,  # [tiles, GROUPS] int32, zero before and after
    T, O, K, plain, shared, of_t,
    GROUPS: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_I: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    SWAP: gl.constexpr, SPLIT: gl.constexpr, REGISTERS: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    
    if SWAP:
        x_smem = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, BLOCK_B, BLOCK_I], x_tiles.layout)
        w_smem = gl.allocate_shared_memory(w_tiles.dtype, [STAGES * GROUPS, 8 // PARTS, PARTS, 8, BLOCK_I], w_tiles.layout)
    else:
        x_smem = gl.allocate_shared_memory(x_tiles.dtype, [STAGES * GROUPS, 64, BLOCK_I], x_tiles.layout)
        w_smem = gl.allocate_shared_memory(w_tiles.dtype, [STAGES, PARTS, BLOCK_B // PARTS, BLOCK_I], w_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t, 0, GROUPS, BLOCK_B, BLOCK_I, PARTS, STAGES, SWAP, SPLIT, HAS_BIAS, PDL)),
            ],
            [], [],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t, 0, GROUPS, BLOCK_B, BLOCK_I, PARTS, STAGES, SWAP, SPLIT, HAS_BIAS, PDL)),
                (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t, 1, GROUPS, BLOCK_B, BLOCK_I, PARTS, STAGES, SWAP, SPLIT, HAS_BIAS, PDL)),
            ],
            [4], [REGISTERS],
        )  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t, 0, GROUPS, BLOCK_B, BLOCK_I, PARTS, STAGES, SWAP, SPLIT, HAS_BIAS, PDL)),
                (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t, 1, GROUPS, BLOCK_B, BLOCK_I, PARTS, STAGES, SWAP, SPLIT, HAS_BIAS, PDL)),
                (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t, 2, GROUPS, BLOCK_B, BLOCK_I, PARTS, STAGES, SWAP, SPLIT, HAS_BIAS, PDL)),
            ],
            [4, 4], [REGISTERS, REGISTERS],
        )  # fmt: skip
    elif GROUPS == 4:
        gl.warp_specialize(
            [
                (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t, 0, GROUPS, BLOCK_B, BLOCK_I, PARTS, STAGES, SWAP, SPLIT, HAS_BIAS, PDL)),
                (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t, 1, GROUPS, BLOCK_B, BLOCK_I, PARTS, STAGES, SWAP, SPLIT, HAS_BIAS, PDL)),
                (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t, 2, GROUPS, BLOCK_B, BLOCK_I, PARTS, STAGES, SWAP, SPLIT, HAS_BIAS, PDL)),
                (_multiply, (x_tiles, w_tiles, x_smem, w_smem, full, empty, bias, y, partials, arrivals, T, O, plain, shared, K, of_t, 3, GROUPS, BLOCK_B, BLOCK_I, PARTS, STAGES, SWAP, SPLIT, HAS_BIAS, PDL)),
            ],
            [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip


class Tiles:  # of the sweep
    def __init__(self, groups, block, block_i, stages, programs, even=True, swap=False):
        self.groups, self.block, self.block_i, self.stages, self.programs, self.even, self.swap = groups, block, block_i, stages, programs, even, swap
    def __repr__(self):
        return f"{'W' if self.swap else ''}g{self.groups} b{self.block} i{self.block_i} s{self.stages} p{self.programs} {'even' if self.even else 'plain'}"


@cache
def counters(device: torch.device) -> Tensor:
    return torch.zeros(4096, dtype=torch.int32, device=device)


def launch_many_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gated: bool, tiles) -> Tensor:
    (T, I), rows = x_TI.shape, weight_OI.shape[0]
    O, parts = (rows // 2, 2) if gated else (rows, 1)
    block_t, block_o = (tiles.block, 64 * tiles.groups) if tiles.swap else (64 * tiles.groups, tiles.block)
    of_o, of_t, K = triton.cdiv(rows, block_o), triton.cdiv(T, block_t), triton.cdiv(I, tiles.block_i)
    number = of_o * of_t
    programs = min(tiles.programs, number * K if tiles.even else number)
    shared = number % programs if tiles.even else 0
    if shared * K < programs:
        shared = 0
    plain = number - shared
    y_TO = x_TI.new_empty(T, O)
    partials = arrivals = y_TO
    if shared:
        partials = x_TI.new_empty(programs, 2, tiles.groups, 64, tiles.block, dtype=torch.float32)
        arrivals = counters(x_TI.device)
    x_tiles = TensorDescriptor(x_TI, list(x_TI.shape), [x_TI.stride(0), 1], [tiles.block if tiles.swap else 64, tiles.block_i], _layout(2))
    if tiles.swap:
        w_tiles = TensorDescriptor(weight_OI, [O // 8, parts, 8, I], [8 * I, O * I, I, 1], [8 // parts, parts, 8, tiles.block_i], _layout(4))
    else:
        w_tiles = TensorDescriptor(weight_OI, [parts, O, I], [O * I, I, 1], [parts, block_o // parts, tiles.block_i], _layout(3))
    many_linear_kernel[(programs,)](
        x_tiles, w_tiles, weight_OI if bias_O is None else bias_O, y_TO, partials, arrivals, T, O, K, plain, shared, of_t,
        GROUPS=tiles.groups, BLOCK_B=tiles.block, BLOCK_I=tiles.block_i, PARTS=parts, STAGES=tiles.stages,
        SWAP=tiles.swap, SPLIT=shared > 0, REGISTERS=REGISTERS[tiles.groups], HAS_BIAS=bias_O is not None, num_warps=4,
        maxnreg=REGISTERS[tiles.groups], **chained(x_TI.device),
    )  # fmt: skip
    return y_TO


@cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
