"""The product of few rows with a weight of 8 or 4 bits whose codes go from memory straight into registers, for Hopper GPUs.

Up to 16 rows of x a product lasts a few microseconds, most of which a kernel that keeps codes in shared memory spends on
waiting: for stages, for other warps, and for loads of its own.  Here a warp loads, converts and multiplies alone.  A lane's
load of 16 bytes of a row brings 8 words of codes (see codes.py), and these are the very numbers that the tensor cores take
from that lane, if the columns of a step are taken in another order; x is loaded in the same order.  So codes are never moved,
and no warp waits for another before the sums of their columns are added up.

Loads run AHEAD steps in front of products.  The first of them leave before the kernel waits for its input, since no kernel
writes codes or scales.  Scales and zeros belong to whole rows or to whole halves of a slice, so that a scale multiplies the
float32 sum of a half, and nothing is rounded before the end.

This module knows no model's shapes and chooses no tiles.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.  J pairs of
words of a row of codes, G groups of a row.  S slices, B rows of a tile, N rows of x in the tensor cores' tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from specdec.ops.launch import chained
from specdec.ops.products.linear_hopper import EIGHT, _let_the_next_kernel_start, _wait_for_the_kernel_in_front
from specdec.ops.products.linear_triton import ARRIVALS, arrivals_of
from specdec.ops.quantised.codes import codes_a_word
from specdec.ops.quantised.linear_triton import E2M1_ASM, E4M3_ASM, INT4_ASM, INT8_ASM
from specdec.ops.quantised.parts_hopper import complete, scales_of_rows, weight_rows

if TYPE_CHECKING:
    from specdec.ops.quantised.codes import Codes
    from specdec.ops.quantised.tiles import RegisterTiles


@gluon.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def quantised_registers_kernel(
    x,  # [T, I / 2], pairs of columns in 32 bits
    codes,  # [PARTS * O, J], pairs of words in 32 bits
    scales,  # [PARTS * O, G]
    zeros,  # as scales
    bias,  # [PARTS * O]
    y,  # [T, O]
    partials,  # [tiles, SPLITS, BLOCK_O, N] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    T, O, I, J, G, stride_x,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr, BLOCK_O: gl.constexpr,
    SLICES: gl.constexpr, SPLITS: gl.constexpr, AHEAD: gl.constexpr, STEPS: gl.constexpr, EVEN: gl.constexpr,
    PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """SLICES groups of warps take different slices, of 64 words a row, of a step.  STEPS: of a program.

    EVEN: whether every step of every program has all its slices.  PARTS: 2 if gated, else 1.
    """
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    N: gl.constexpr = 8 if ROWS < 8 else ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, num_warps // SLICES, 1], [1, 16, 8])
    out: gl.constexpr = gl.SliceLayout(0, layout)
    wide: gl.constexpr = gl.DotOperandLayout(0, layout, 4)  # 16 bytes of a row a lane
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    tile = gl.program_id(0)
    split = gl.program_id(1)
    low = split * (STEPS * SLICES)
    slices = gl.cdiv(I, 64 * A_WORD)  # that there are

    row_B = inside(gl.arange(0, BLOCK_O, gl.SliceLayout(0, gl.SliceLayout(2, wide))), tile, O, BLOCK_O, PARTS)
    s_S = low + gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, wide)))
    pair_J = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, wide)))
    codes += row_B.to(gl.int64)[None, :, None] * J + s_S[:, None, None] * 32 + pair_J[None, None, :]
    own = s_S[:, None, None]
    scales_SB, own_SB = places(scales, low, tile, O, G, A_WORD, GROUP, SLICES, BLOCK_O, PARTS, gl.SliceLayout(2, layout))
    zeros_SB, own_zeros_SB = places(zeros, low, tile, O, G, A_WORD, GROUP, SLICES, BLOCK_O, PARTS, gl.SliceLayout(2, left))
    row_scale = scales_of_rows(scales, tile, O, GROUP, BLOCK_O, PARTS, out)
    ring = ()  # type: Any
    for k in gl.static_range(AHEAD):
        ring = ring + (
            fetch(
                codes, scales_SB, zeros_SB, own, own_SB, own_zeros_SB, k, slices, A_WORD, GROUP, HAS_ZEROS, SLICES, STEPS, EVEN,
            ),
        )  # fmt: skip
    if PDL:
        _wait_for_the_kernel_in_front()
        _let_the_next_kernel_start()

    x_layout: gl.constexpr = columns_layout(A_WORD, SLICES, num_warps // SLICES, N)
    s_x = low + gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    t_x = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    q_x = gl.arange(0, 4 * A_WORD, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, x_layout))))
    i_x = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))))
    # A lane c of four holds words 8 c % 16 to 8 c % 16 + 7 of run c // 2; code p of a word is 16 columns after code p - 1.
    pair_q = q_x // (2 * A_WORD) * (8 * A_WORD) + q_x % A_WORD * 8 + q_x // A_WORD % 2 * 4
    row_x = gl.where(t_x < T, t_x, 0) * (0 if ROWS == 1 else stride_x)  # rows beyond T are computed and not stored
    x += row_x[None, :, None, None] + (s_x * (32 * A_WORD))[:, None, None, None] + pair_q[None, None, :, None]
    x += i_x[None, None, None, :]
    own_x = s_x[:, None, None, None]
    acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    other_acc = gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout)
    columns = columns_of(x, own_x, 0, 0, slices, A_WORD, SLICES, EVEN)
    LOOPED: gl.constexpr = 0 if STEPS < 2 * AHEAD else STEPS // AHEAD * AHEAD
    for k in range(0, LOOPED, AHEAD):
        for n in gl.static_range(AHEAD):
            held = ring[0]
            ring = ring[1:] + (
                fetch(
                    codes, scales_SB, zeros_SB, own, own_SB, own_zeros_SB, k + n + AHEAD, slices, A_WORD, GROUP, HAS_ZEROS,
                    SLICES, STEPS, EVEN,
                ),
            )  # fmt: skip
            acc, other_acc, columns = step(
                held, columns, acc, other_acc, x, own_x, k + n, slices, layout, KIND, GROUP, HAS_ZEROS, SLICES, BLOCK_O, N,
                STEPS, EVEN,
            )  # fmt: skip
    for n in gl.static_range(LOOPED, STEPS):
        held = ring[0]
        ring = ring[1:]
        if LOOPED == 0 and n + AHEAD < STEPS:
            ring = ring + (
                fetch(
                    codes, scales_SB, zeros_SB, own, own_SB, own_zeros_SB, n + AHEAD, slices, A_WORD, GROUP, HAS_ZEROS, SLICES,
                    STEPS, EVEN,
                ),
            )  # fmt: skip
        acc, other_acc, columns = step(
            held, columns, acc, other_acc, x, own_x, n, slices, layout, KIND, GROUP, HAS_ZEROS, SLICES, BLOCK_O, N, STEPS, EVEN,
        )  # fmt: skip
    total = gl.sum(acc + other_acc, axis=0)
    complete(
        total, out, row_scale, bias, y, partials, arrivals, tile, 0, split, T, O, GROUP, N, BLOCK_O, SPLITS, PARTS, HAS_BIAS,
        num_warps,
    )  # fmt: skip


@gluon.constexpr_function
def columns_layout(A_WORD: int, SLICES: int, WARPS: int, N: int) -> gl.DistributedLinearLayout:
    """How columns of half a slice are loaded, [SLICES, N, 4 * A_WORD, 4]: 16 bytes a lane, in the lane that multiplies them."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], *([0, 0, 1 << bit, 0] for bit in range(A_WORD.bit_length() - 1))]
    registers += [[0, 8 << bit, 0, 0] for bit in range((N // 8).bit_length() - 1)]
    lanes = [[0, 0, A_WORD, 0], [0, 0, 2 * A_WORD, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warps = [[0, 0, 0, 0]] * (WARPS.bit_length() - 1) + [[1 << bit, 0, 0, 0] for bit in range(SLICES.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [SLICES, N, 4 * A_WORD, 4])


@gluon.jit
def inside(r, tile, O, BLOCK_O: gl.constexpr, PARTS: gl.constexpr):
    """The weight's rows that are rows r of a tile; those beyond its end read row 0, and are not stored."""
    row = weight_rows(r, tile, O, BLOCK_O, PARTS)
    return gl.where(row < PARTS * O, row, 0)


@gluon.jit
def places(
    of_groups, low, tile, O, G, A_WORD: gl.constexpr, GROUP: gl.constexpr, SLICES: gl.constexpr, BLOCK_O: gl.constexpr,
    PARTS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Where scales or zeros of a program's first step lie, [S, B], and the numbers of its slices, [S, 1]."""
    HELD: gl.constexpr = 64 * A_WORD // GROUP if GROUP > 0 else 1
    row_B = inside(gl.arange(0, BLOCK_O, gl.SliceLayout(0, layout)), tile, O, BLOCK_O, PARTS)
    s_S = low + gl.arange(0, SLICES, gl.SliceLayout(1, layout))
    return of_groups + row_B.to(gl.int64)[None, :] * G + (s_S * HELD)[:, None], s_S[:, None]


@gluon.jit
def fetch(
    codes, scales_SB, zeros_SB, own, own_SB, own_zeros_SB, k, slices, A_WORD: gl.constexpr, GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr, SLICES: gl.constexpr, STEPS: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """What a warp holds of step k: codes, and scales and zeros of both halves.  A step beyond the last one is never read."""
    HELD: gl.constexpr = 64 * A_WORD // GROUP if GROUP > 0 else 1
    SECOND: gl.constexpr = 1 if HELD == 2 else 0
    codes += k * (32 * SLICES)
    ok = k < STEPS if EVEN else (own + k * SLICES < slices) & (k < STEPS)
    held = (gl.load(codes, mask=ok),)  # type: Any
    k = gl.minimum(k, STEPS - 1)
    if GROUP > 0:
        ok = True if EVEN else own_SB + k * SLICES < slices
        scales_SB += k * (HELD * SLICES)
        first = gl.load(scales_SB, mask=ok, other=0)
        held = held + (first, gl.load(scales_SB + 1, mask=ok, other=0) if SECOND else first)
    if HAS_ZEROS:
        ok = True if EVEN else own_zeros_SB + k * SLICES < slices
        zeros_SB += k * (HELD * SLICES)
        zero = gl.load(zeros_SB, mask=ok, other=0)
        held = held + (zero, gl.load(zeros_SB + 1, mask=ok, other=0) if SECOND else zero)
    return held


@gluon.jit
def columns_of(x, own, k, half: gl.constexpr, slices, A_WORD: gl.constexpr, SLICES: gl.constexpr, EVEN: gl.constexpr):
    """x's columns of half a step."""
    at = x + k * (32 * A_WORD * SLICES) + half * (16 * A_WORD)
    if EVEN:
        return gl.load(at)
    else:
        return gl.load(at, mask=own + k * SLICES < slices, other=0)


@gluon.jit
def step(
    held, columns, acc, other_acc, x, own, k, slices, layout: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr, SLICES: gl.constexpr, BLOCK_O: gl.constexpr, N: gl.constexpr, STEPS: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Multiplies a step's slices by `columns` and those of the second half; returns the sums, and the next step's columns."""
    A_WORD: gl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    # [S, B, half, lane, i] -> [S, B, lane, i, half]
    halves = gl.split(gl.permute(gl.reshape(held[0], [SLICES, BLOCK_O, 2, 4, 4]), (0, 1, 3, 4, 2)))
    for half in gl.static_range(2):
        here = columns
        if half == 0:
            columns = columns_of(x, own, k, 1, slices, A_WORD, SLICES, EVEN)
        else:
            columns = columns_of(x, own, gl.minimum(k + 1, STEPS - 1), 0, slices, A_WORD, SLICES, EVEN)
        numbers = numbers_of_half(halves[half], held[3 + half] if HAS_ZEROS else 0, layout, KIND, HAS_ZEROS, SLICES, BLOCK_O)
        # [S, N, lane, p, i] -> [S, (i, p, lane, which of the pair), N]
        here = gl.permute(gl.reshape(here, [SLICES, N, 4, A_WORD, 4]), (0, 4, 3, 2, 1))
        here = gl.permute(halves_of(here), (0, 1, 2, 3, 5, 4))
        here = gl.reshape(here, [SLICES, 32 * A_WORD, N]).to(gl.bfloat16, bitcast=True)
        here = gl.convert_layout(here, right, assert_trivial=True)
        if GROUP > 0:
            part = mma_v2(numbers, here, gl.zeros([SLICES, BLOCK_O, N], gl.float32, layout))
            acc += part * held[1 + half].to(gl.float32)[:, :, None]
        elif half == 0:  # two chains of products, which the tensor cores work at side by side
            acc = mma_v2(numbers, here, acc)
        else:
            other_acc = mma_v2(numbers, here, other_acc)
    return acc, other_acc, columns


@gluon.jit
def halves_of(pairs):
    """The lower and the higher 16 bits, in a last dim of two."""
    return gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16))


@gluon.jit
def numbers_of_half(
    pairs, zero, layout: gl.constexpr, KIND: gl.constexpr, HAS_ZEROS: gl.constexpr, SLICES: gl.constexpr, BLOCK_O: gl.constexpr
):  # fmt: skip
    """Pairs of words [S, B, lane, i] as numbers [S, B, (i, p, lane, which of the pair)]: no code leaves its lane."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    words = gl.reshape(gl.permute(halves_of(pairs), (0, 1, 3, 2, 4)), [SLICES, BLOCK_O, 32])
    words = gl.convert_layout(words, left, assert_trivial=True)
    if HAS_ZEROS:
        zero = zero.to(gl.float32)[:, :, None]
    if KIND == "int4" or KIND == "e2m1":
        if KIND == "e2m1":
            a, b, c, d = gl.inline_asm_elementwise(
                E2M1_ASM, "=r,=r,=r,=r,r", [words], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True,
                pack=2,
            )  # fmt: skip
        else:
            middle = gl.full(words.shape, 136, gl.bfloat16, left)
            if HAS_ZEROS:
                middle = (zero + 136).to(gl.bfloat16).broadcast_to(words.shape)
            a, b, c, d = gl.inline_asm_elementwise(
                INT4_ASM, "=r,=r,=r,=r,r,r,r", [words, middle, middle],
                dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        both = gl.join(gl.join(a, c), gl.join(b, d))  # the last two dims: the higher and the lower bit of p
        both = gl.permute(gl.reshape(both, [SLICES, BLOCK_O, 4, 4, 2, 2, 2]), (0, 1, 2, 5, 6, 3, 4))
    else:
        PROGRAM: gl.constexpr = E4M3_ASM if KIND == "e4m3" else INT8_ASM
        a, b = gl.inline_asm_elementwise(PROGRAM, "=r,=r,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
        if HAS_ZEROS:
            a, b = a - zero.to(gl.bfloat16), b - zero.to(gl.bfloat16)
        both = gl.permute(gl.reshape(gl.join(a, b), [SLICES, BLOCK_O, 4, 4, 2, 2]), (0, 1, 2, 5, 3, 4))
    return gl.convert_layout(gl.reshape(both, [SLICES, BLOCK_O, both.numel // (SLICES * BLOCK_O)]), left, assert_trivial=True)


def launch_quantised_registers(x_TI: Tensor, weight: Codes, bias_O: Tensor | None, gated: bool, tiles: RegisterTiles) -> Tensor:
    """[T, O], or [T, F] if gated, in bfloat16.  Rows of x must start at multiples of 16 bytes, and I be whole slices.

    Scales are those of whole rows, of whole slices or of halves of them.
    """
    (T, I), rows = x_TI.shape, weight.codes_OJ.shape[0]
    O, parts = (rows // 2, 2) if gated else (rows, 1)
    width = 64 * codes_a_word(weight.kind)
    assert 0 < T <= tiles.block_t and weight.columns == I and I % width == 0 and x_TI.stride(1) == 1 and O % EIGHT == 0
    assert weight.group in (0, width, width // 2) and (weight.zeros_OG is None or weight.group)
    assert x_TI.dtype == torch.bfloat16 and (bias_O is None or bias_O.shape == (rows,))
    steps = triton.cdiv(triton.cdiv(I, width * tiles.slices), tiles.splits)
    num_tiles = triton.cdiv(rows, tiles.block_o)
    y_TO = x_TI.new_empty(T, O)
    partials = arrivals = y_TO
    if tiles.splits > 1:
        assert num_tiles <= ARRIVALS
        partials = x_TI.new_empty(num_tiles, tiles.splits, tiles.block_o, max(8, tiles.block_t), dtype=torch.float32)
        arrivals = arrivals_of(x_TI.device)
    pairs_TI, codes_OJ, scales_OG = x_TI.view(torch.int32), weight.codes_OJ.view(torch.int32), weight.scales_OG
    most: dict[str, Any] = {"maxnreg": tiles.registers} if tiles.registers else {}
    quantised_registers_kernel[(num_tiles, tiles.splits)](
        pairs_TI, codes_OJ, scales_OG, scales_OG if weight.zeros_OG is None else weight.zeros_OG,
        scales_OG if bias_O is None else bias_O, y_TO, partials, arrivals,
        T, O, I, codes_OJ.shape[1], scales_OG.shape[1], pairs_TI.stride(0),
        KIND=weight.kind, GROUP=weight.group, HAS_ZEROS=weight.zeros_OG is not None, ROWS=tiles.block_t, BLOCK_O=tiles.block_o,
        SLICES=tiles.slices, SPLITS=tiles.splits, AHEAD=min(tiles.ahead, steps), STEPS=steps,
        EVEN=I == steps * tiles.splits * tiles.slices * width, PARTS=parts, HAS_BIAS=bias_O is not None, num_warps=tiles.warps,
        **most, **chained(x_TI.device),
    )  # fmt: skip
    return y_TO
