"""The product of few rows with a weight of 8 or 4 bits whose codes go from memory straight into registers, for Hopper GPUs.

Up to 16 rows of x a product lasts a few microseconds, most of which a kernel that keeps codes in shared memory spends on waiting:
for stages, for other warps, and for loads of its own.  Here a warp loads, converts and multiplies alone.  A lane's load of 16 bytes
of a row brings 8 words of codes (see codes.py), and these are the very numbers that the tensor cores take from that lane, if the
columns of a step are taken in another order; x is loaded in the same order.  So codes are never moved, and no warp waits for
another before the sums of their columns are added up.

Loads run AHEAD steps in front of products.  The first of them leave before the kernel waits for its input, since no kernel writes
codes or scales.  Scales and zeros belong to whole rows or to whole halves of a slice, so that a scale multiplies the float32
sum of a half, and nothing is rounded before the end.

This module knows no model's shapes and chooses no tiles.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.  J pairs of words
of a row of codes, G groups of a row.  S slices, B rows of a tile, N rows of x in the tensor cores' tiles.
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
    from specdec.ops.quantised.tiles import DirectTiles


@gluon.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def quantised_direct_kernel(
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

    row_B = rows_of(gl.arange(0, BLOCK_O, gl.SliceLayout(0, gl.SliceLayout(2, wide))), tile, O, BLOCK_O, PARTS)
    s_S = low + gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, wide)))
    pair_J = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, wide)))
    codes += row_B.to(gl.int64)[None, :, None] * J + s_S[:, None, None] * 32 + pair_J[None, None, :]
    own = s_S[:, None, None]
    scales_SB, own_SB = places(scales, low, tile, O, G, A_WORD, GROUP, SLICES, BLOCK_O, PARTS, gl.SliceLayout(2, layout))
    zeros_SB, _ = places(zeros, low, tile, O, G, A_WORD, GROUP, SLICES, BLOCK_O, PARTS, gl.SliceLayout(2, left))
    row_scale = scales_of_rows(scales, tile, O, GROUP, BLOCK_O, PARTS, out)
    ring = ()
    for k in gl.static_range(AHEAD):
        ring = ring + (fetch(codes, scales_SB, zeros_SB, own, own_SB, k, slices, A_WORD, GROUP, HAS_ZEROS, SLICES, EVEN),)
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
            at = gl.minimum(k + n + AHEAD, STEPS - 1)  # the last step is fetched again, for nothing
            ring = ring[1:] + (
                fetch(codes, scales_SB, zeros_SB, own, own_SB, at, slices, A_WORD, GROUP, HAS_ZEROS, SLICES, EVEN),
            )
            acc, other_acc, columns = step(
                held, columns, acc, other_acc, x, own_x, k + n, slices, layout, KIND, GROUP, HAS_ZEROS, SLICES, BLOCK_O, N, STEPS, EVEN,
            )  # fmt: skip
    for n in gl.static_range(LOOPED, STEPS):
        held = ring[0]
        ring = ring[1:]
        if LOOPED == 0 and n + AHEAD < STEPS:
            ring = ring + (
                fetch(codes, scales_SB, zeros_SB, own, own_SB, n + AHEAD, slices, A_WORD, GROUP, HAS_ZEROS, SLICES, EVEN),
            )
        acc, other_acc, columns = step(
            held, columns, acc, other_acc, x, own_x, n, slices, layout, KIND, GROUP, HAS_ZEROS, SLICES, BLOCK_O, N, STEPS, EVEN,
        )  # fmt: skip
    total = gl.sum(acc + other_acc, axis=0)
    complete(
        total, out, row_scale, bias, y, partials, arrivals, tile, 0, split, T, O, GROUP, N, BLOCK_O, SPLITS, PARTS, HAS_BIAS,
        num_warps,
    )  # fmt: skip
