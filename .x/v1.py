"""Prototype: codes from memory straight into registers, in the order in which the tensor cores take them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from specdec.ops.launch import chained
from specdec.ops.products.linear_hopper import _let_the_next_kernel_start, _wait_for_the_kernel_in_front
from specdec.ops.products.linear_triton import ARRIVALS, arrivals_of
from specdec.ops.quantised.codes import codes_a_word
from specdec.ops.quantised.linear_triton import E4M3_ASM, INT4_ASM
from specdec.ops.quantised.parts_hopper import complete, scales_of_rows, weight_rows


@gluon.jit(do_not_specialize=["T"])
def quantised_direct_kernel(
    x, words, scales, bias, y, partials, arrivals,
    T, O, I, J, G, stride_x,
    KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_O: gl.constexpr, SLICES: gl.constexpr,
    SPLITS: gl.constexpr, AHEAD: gl.constexpr, STEPS: gl.constexpr, EVEN: gl.constexpr, X_AHEAD: gl.constexpr, PARTS: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    A_WORD: gl.constexpr = 4 if KIND == "int4" else 2
    SLICE: gl.constexpr = 64 * A_WORD
    N: gl.constexpr = 8 if ROWS < 8 else ROWS
    tile = gl.program_id(0)
    split = gl.program_id(1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, num_warps // SLICES, 1], [1, 16, 8])
    wide: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    # codes: [SLICES, BLOCK_O, 32 pairs of words]
    s_w = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, wide)))
    r_w = gl.arange(0, BLOCK_O, gl.SliceLayout(0, gl.SliceLayout(2, wide)))
    j_w = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, wide)))
    row = weight_rows(r_w, tile, O, BLOCK_O, PARTS)
    row = gl.where(row < PARTS * O, row, 0)
    first = split * STEPS * SLICES  # slices of 64 words
    at_w = words + row.to(gl.int64)[None, :, None] * J + (first + s_w)[:, None, None] * 32 + j_w[None, None, :]
    # scales: [SLICES, BLOCK_O, groups of a slice]
    out: gl.constexpr = gl.SliceLayout(0, layout)
    row_scale = scales_of_rows(scales, tile, O, GROUP, BLOCK_O, PARTS, out)
    r_g = gl.arange(0, BLOCK_O, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    s_g = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row_g = weight_rows(r_g, tile, O, BLOCK_O, PARTS)
    row_g = gl.where(row_g < PARTS * O, row_g, 0)
    HELD: gl.constexpr = SLICE // GROUP if GROUP > 0 else 1
    at_g = scales + row_g[None, :] * G + (first + s_g)[:, None] * HELD
    last = gl.cdiv(I, SLICE)  # slices that there are
    ok_w = first + s_w
    ok_g = first + s_g
    # x: [SLICES, 8 words of columns' places, N, ...]
    c_x: gl.constexpr = _x_layout(A_WORD, SLICES, num_warps // SLICES, N)
    s_x = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, c_x))))
    n_x = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, c_x))))
    q_x = gl.arange(0, 8 * A_WORD, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, c_x))))
    e_x = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, c_x))))
    # q = (half, run's low bit, q half, p): the slice's run is q // (2 * A_WORD)
    run = q_x // (2 * A_WORD)
    place = run * (8 * A_WORD) + q_x % A_WORD * 8 + q_x // A_WORD % 2 * 4  # in pairs
    if ROWS == 1:
        of_n = n_x * 0
    else:
        of_n = gl.where(n_x < T, n_x, 0) * stride_x
    at_x = x + of_n[None, :, None, None] + ((first + s_x) * (SLICE // 2))[:, None, None, None] + place[None, None, :, None] + e_x[None, None, None, :]
    ok_x = first + s_x

    ring = ()
    scale_ring = ()
    for d in gl.static_range(AHEAD):
        if EVEN:
            ring = ring + (gl.load(at_w + d * (32 * SLICES)),)
        else:
            ring = ring + (gl.load(at_w + d * (32 * SLICES), mask=(ok_w + d * SLICES < last)[:, None, None], other=0),)
        if GROUP > 0:
            scale_ring = scale_ring + (_scales(at_g + d * (HELD * SLICES), (ok_g + d * SLICES < last)[:, None], HELD, EVEN),)
    if PDL:
        _wait_for_the_kernel_in_front()
        _let_the_next_kernel_start()
    acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    other_acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    columns = _x(at_x, ok_x < last, EVEN, layout, A_WORD, SLICES, N)
    WHOLE: gl.constexpr = STEPS // AHEAD * AHEAD
    if WHOLE > AHEAD:
        for k in range(0, WHOLE, AHEAD):
            for d in gl.static_range(AHEAD):
                codes = ring[0]
                more = k + d + AHEAD < STEPS
                if EVEN:
                    ring = ring[1:] + (gl.load(at_w + (k + d + AHEAD) * (32 * SLICES), mask=more, other=0),)
                else:
                    ring = ring[1:] + (gl.load(at_w + (k + d + AHEAD) * (32 * SLICES), mask=(ok_w + (k + d + AHEAD) * SLICES < last)[:, None, None] & more, other=0),)
                if GROUP > 0:
                    scale = scale_ring[0]
                    ok = (ok_g + (k + d + AHEAD) * SLICES < last) & more
                    scale_ring = scale_ring[1:] + (_scales(at_g + (k + d + AHEAD) * (HELD * SLICES), ok[:, None], HELD, False),)
                else:
                    scale = ()
                here = columns
                if X_AHEAD:
                    columns = _x(at_x + (k + d + 1) * (SLICE // 2 * SLICES), (ok_x + (k + d + 1) * SLICES < last) & (k + d + 1 < STEPS), False, layout, A_WORD, SLICES, N)
                elif k + d > 0:
                    here = _x(at_x + (k + d) * (SLICE // 2 * SLICES), ok_x + (k + d) * SLICES < last, EVEN, layout, A_WORD, SLICES, N)
                acc, other_acc = _step(codes, here, scale, acc, other_acc, layout, KIND, GROUP, A_WORD, SLICES, BLOCK_O, N)
        FROM: gl.constexpr = WHOLE
    else:
        FROM: gl.constexpr = 0
    for d in gl.static_range(FROM, STEPS):
        codes = ring[0]
        ring = ring[1:]
        if GROUP > 0:
            scale = scale_ring[0]
            scale_ring = scale_ring[1:]
        else:
            scale = ()
        if FROM == 0 and d + AHEAD < STEPS:
            ring = ring + (gl.load(at_w + (d + AHEAD) * (32 * SLICES), mask=(ok_w + (d + AHEAD) * SLICES < last)[:, None, None], other=0),)
            if GROUP > 0:
                scale_ring = scale_ring + (_scales(at_g + (d + AHEAD) * (HELD * SLICES), (ok_g + (d + AHEAD) * SLICES < last)[:, None], HELD, EVEN),)
        here = columns
        if X_AHEAD:
            if d + 1 < STEPS:
                columns = _x(at_x + (d + 1) * (SLICE // 2 * SLICES), ok_x + (d + 1) * SLICES < last, EVEN, layout, A_WORD, SLICES, N)
        elif d > 0:
            here = _x(at_x + d * (SLICE // 2 * SLICES), ok_x + d * SLICES < last, EVEN, layout, A_WORD, SLICES, N)
        acc, other_acc = _step(codes, here, scale, acc, other_acc, layout, KIND, GROUP, A_WORD, SLICES, BLOCK_O, N)
    total = gl.sum(acc + other_acc, axis=0)
    complete(
        total, out, row_scale, bias, y, partials, arrivals, tile, 0, split, T, O, GROUP, N, BLOCK_O, SPLITS, PARTS, HAS_BIAS,
        num_warps,
    )  # fmt: skip


@gluon.constexpr_function
def _x_layout(A_WORD, SLICES, WARPS, N):
    regs = [[0, 0, 0, 1], [0, 0, 0, 2]]
    p = 1
    while p < A_WORD:
        regs.append([0, 0, p, 0])
        p *= 2
    lanes = [[0, 0, p, 0], [0, 0, 2 * p, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    regs.append([0, 0, 4 * p, 0])
    n = 8
    while n < N:
        regs.append([0, n, 0, 0])
        n *= 2
    warps = []
    w = 1
    while w < WARPS:
        warps.append([0, 0, 0, 0])
        w *= 2
    w = 1
    while w < SLICES:
        warps.append([w, 0, 0, 0])
        w *= 2
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [SLICES, N, 8 * A_WORD, 4])


@gluon.jit
def _x(at, ok, EVEN: gl.constexpr, layout: gl.constexpr, A_WORD: gl.constexpr, SLICES: gl.constexpr, N: gl.constexpr):
    """x of a step, [SLICES, 64 * A_WORD, N]: columns in the order of the codes' places."""
    if EVEN:
        v = gl.load(at)
    else:
        v = gl.load(at, mask=ok[:, None, None, None], other=0)
    return v


@gluon.jit
def _scales(at, ok, HELD: gl.constexpr, EVEN: gl.constexpr):
    if EVEN:
        a = gl.load(at)
        b = gl.load(at + 1) if HELD > 1 else a
    else:
        a = gl.load(at, mask=ok, other=0.0)
        b = gl.load(at + 1, mask=ok, other=0.0) if HELD > 1 else a
    return a, b


@gluon.jit
def _step(codes, columns, scale, acc, other_acc, layout: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, A_WORD: gl.constexpr,
          SLICES: gl.constexpr, BLOCK_O: gl.constexpr, N: gl.constexpr):
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    # [S, B, half 2, c 4, i 4, h 2] -> [S, B, c, i, h, half]
    v = gl.permute(gl.reshape(codes, [SLICES, BLOCK_O, 2, 4, 4]), (0, 1, 3, 4, 2))
    # [S, N, half 2, c 4, p A_WORD, i 4] -> [S, i, p, c, N, half]
    xs = gl.permute(gl.reshape(columns, [SLICES, N, 2, 4, A_WORD, 4]), (0, 5, 4, 3, 1, 2))
    halves = gl.split(v)
    x_halves = gl.split(xs)
    for n in gl.static_range(2):
        numbers = _numbers(_pairs(halves[n]), left, KIND, A_WORD, SLICES, BLOCK_O)
        here = gl.permute(_pairs(x_halves[n]), (0, 1, 2, 3, 5, 4))
        here = gl.reshape(here, [SLICES, 32 * A_WORD, N]).to(gl.bfloat16, bitcast=True)
        here = gl.convert_layout(here, right, assert_trivial=True)
        if GROUP > 0:
            part = mma_v2(numbers, here, gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout))
            acc += part * scale[n].to(gl.float32)[:, :, None]
        elif n == 0:
            acc = mma_v2(numbers, here, acc)
        else:
            other_acc = mma_v2(numbers, here, other_acc)
    return acc, other_acc


@gluon.jit
def _pairs(v):
    """Halves of 32 bits, in a last dim of two."""
    return gl.join(v.to(gl.int16), (v >> 16).to(gl.int16))


@gluon.jit
def _numbers(v, left: gl.constexpr, KIND: gl.constexpr, A_WORD: gl.constexpr, SLICES: gl.constexpr, BLOCK_O: gl.constexpr):
    """[S, B, c 4, i 4, h 2] words -> [S, B, (i, p, c, h)] numbers."""
    if KIND == "int4":
        middle = gl.full(v.shape, 136, gl.bfloat16, v.type.layout)
        a, b, c, d = gl.inline_asm_elementwise(
            INT4_ASM, "=r,=r,=r,=r,r,r,r", [v, middle, middle],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        both = gl.join(gl.join(a, c), gl.join(b, d))  # [.., p bit 1, p bit 0]
        both = gl.permute(both, (0, 1, 3, 5, 6, 2, 4))
    else:
        a, b = gl.inline_asm_elementwise(E4M3_ASM, "=r,=r,r", [v], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
        both = gl.permute(gl.join(a, b), (0, 1, 3, 5, 2, 4))
    return gl.convert_layout(gl.reshape(both, [SLICES, BLOCK_O, 32 * A_WORD]), left, assert_trivial=True)


def launch_direct(x_TI: Tensor, weight, bias_O, gated: bool, tiles) -> Tensor:
    """tiles: block_t, block_o, splits, warps, ahead, slices, x_ahead, maxnreg."""
    block_t, block_o, splits, warps, ahead, slices, x_ahead, maxnreg = tiles
    (T, I), rows = x_TI.shape, weight.codes_OJ.shape[0]
    O, parts = (rows // 2, 2) if gated else (rows, 1)
    width = 64 * codes_a_word(weight.kind)
    steps = triton.cdiv(triton.cdiv(I, width * slices), splits)
    even = I == steps * splits * width * slices
    ahead = min(ahead, steps)
    num_tiles = triton.cdiv(rows, block_o)
    y_TO = x_TI.new_empty(T, O)
    partials = arrivals = y_TO
    if splits > 1:
        assert num_tiles <= ARRIVALS
        partials = x_TI.new_empty(num_tiles, splits, block_o, max(8, block_t), dtype=torch.float32)
        arrivals = arrivals_of(x_TI.device)
    words = weight.codes_OJ.view(torch.int32)
    more = dict(maxnreg=maxnreg) if maxnreg else {}
    return quantised_direct_kernel[(num_tiles, splits)](
        x_TI.view(torch.int32), words, weight.scales_OG, weight.scales_OG if bias_O is None else bias_O, y_TO, partials, arrivals,
        T, O, I, words.shape[1], weight.scales_OG.shape[1], x_TI.stride(0) // 2,
        KIND=weight.kind, GROUP=weight.group, ROWS=block_t, BLOCK_O=block_o, SLICES=slices, SPLITS=splits, AHEAD=ahead,
        STEPS=steps, EVEN=even, X_AHEAD=x_ahead, PARTS=parts, HAS_BIAS=bias_O is not None, num_warps=warps, **more, **chained(x_TI.device),
    ), y_TO  # fmt: skip
