"""Packed words as numbers in registers, and products with far numbers, written in Gluon for Hopper GPUs.

The words of 8 bits and of 4 lie as other codes do (ops/products/formats/quantised.py), so that a register of each holds a pair
of words, and a pair of numbers takes four instructions without moving one past another.  Looking for far numbers there would
double the work, so codes are multiplied as if there were none, and what a tile's far numbers add is computed apart: while the
first columns of x come from L2, these threads read the few numbers of x that the lists ask for.

This module knows no tiles.

Shapes: T rows of x, O out; B rows of a tile, N rows of x that it is multiplied with.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specdec.ops.products.kernels.quantised.parts_hopper import four_pieces, weight_rows


def _program() -> str:
    """The GPU's program for two words of 8 bits of 32 columns ($4) and the next 32 ($5), two of 4 bits ($6), and the base ($7).

    $0 to $3: two numbers each, of 16 columns after each other.
    """
    lines = ["{ .reg .b32 e, t, p; shr.u32 e, $6, 8;"]
    for n in range(4):  # the exponent moves to its place, and sign and fraction to both sides of it
        words, bits, upper = 4 + n // 2, "$6" if n < 2 else "e", n % 2
        lines += [
            f"and.b32 t, {bits}, {0x00F000F0 if upper else 0x000F000F:#x}; mad.lo.u32 t, t, {8 if upper else 128}, $7;",
            f"prmt.b32 p, ${words}, 0, {0x3311 if upper else 0x2200:#x}; lop3.b32 ${n}, p, 0x807f807f, t, 0xea;",
        ]
    return "\n".join([*lines, "}"])


PROGRAM = gl.constexpr(_program())


@gluon.jit
def bases_of_rows(bases, tile, O, BLOCK_O: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """The bases of a tile's rows; rows beyond its end have that of row 0, and are not stored."""
    row_O = weight_rows(gl.arange(0, BLOCK_O, layout), tile, O, BLOCK_O, PARTS)
    return gl.load(bases + gl.where(row_O < PARTS * O, row_O, 0))


@gluon.jit
def numbers_of_packed(low, high, base, layout: gl.constexpr, STEP: gl.constexpr):
    """The numbers of words, [..., STEP] for [..., STEP / 2] of 8 bits and [..., STEP / 4] of 4, as a product's first operand.

    base: with dims for the others, [B, 1] or [1, B, 1].
    """
    RUNS: gl.constexpr = STEP // 64
    if len(high.shape) == 2:
        first, second = gl.split(gl.permute(gl.reshape(low, [low.shape[0], RUNS, 2, 16]), (0, 1, 3, 2)))
    else:
        first, second = gl.split(gl.permute(gl.reshape(low, [low.shape[0], low.shape[1], RUNS, 2, 16]), (0, 1, 2, 4, 3)))
    first = gl.convert_layout(gl.reshape(first, high.shape), high.type.layout, assert_trivial=True)
    second = gl.convert_layout(gl.reshape(second, high.shape), high.type.layout, assert_trivial=True)
    a, b, c, d = gl.inline_asm_elementwise(
        PROGRAM, "=r,=r,=r,=r,r,r,r,r", [first, second, high, base.broadcast_to(high.shape)],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return four_pieces(a, b, c, d, layout, STEP)


@gluon.jit
def far_rows(
    bases, starts, columns, far, most, tile, share, O, SHARES: gl.constexpr, N: gl.constexpr, BLOCK_O: gl.constexpr,
    PARTS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """What is known of a tile's far numbers before x exists.  layout: of the tile's sums [B, N].

    share: of SHARES, which add up the tile's sums: each takes some of each row's far numbers.
    """
    row_O = weight_rows(gl.arange(0, BLOCK_O, gl.SliceLayout(1, layout)), tile, O, BLOCK_O, PARTS)
    ok_O = row_O < PARTS * O
    row_O = gl.where(ok_O, row_O, 0)
    first_O = gl.load(starts + row_O)
    all_O = gl.where(ok_O, gl.load(starts + row_O + 1) - first_O, 0)
    first_O += all_O * share // SHARES
    count_O = all_O * (share + 1) // SHARES - all_O * share // SHARES
    near_O = gl.load(bases + row_O).to(gl.bfloat16, bitcast=True).to(gl.float32)
    rows = (columns + first_O, far + first_O, count_O, near_O)
    return rows, gl.cdiv(_most(most, tile, O, BLOCK_O, PARTS), SHARES), _some(rows, 0, N)


@gluon.jit
def _most(most, tile, O, BLOCK_O: gl.constexpr, PARTS: gl.constexpr):
    """The most far numbers that a row of the tile has.

    It is not computed of their counts: that would compare them across warps.  Triton 3.6 gave this the memory of a barrier that
    was not needed any more, and kernels whose programs share an SM then ran without end now and then.
    """
    found = 0
    for n in gl.static_range(BLOCK_O // 8):
        row = tile * (BLOCK_O // PARTS) + n // PARTS * 8
        found = gl.maximum(found, gl.load(most + (row + n % PARTS * O) // 8, mask=row < O, other=0))
    return found


@gluon.jit
def _some(rows, m, N: gl.constexpr):
    """As many of each row's far numbers as are read together: each takes registers for N rows of x."""
    if N <= 16:
        return _far(rows, m), _far(rows, m + 1), _far(rows, m + 2), _far(rows, m + 3)
    else:
        return _far(rows, m), _far(rows, m + 1)


@gluon.jit
def _far(rows, m):
    """Each row's far number m: its column, and what it differs by from what the codes have; -1 and 0 if there is none."""
    columns_O, far_O, count_O, near_O = rows
    column_O = gl.load(columns_O + m, mask=m < count_O, other=-1)
    number_O = gl.load(far_O + m, mask=m < count_O, other=0).to(gl.bfloat16, bitcast=True).to(gl.float32)
    return column_O, gl.where(m < count_O, number_O - near_O, 0.0)


@gluon.jit
def far_products(rows_of_far, x, stride_x, first_t, T, N: gl.constexpr, layout: gl.constexpr):
    """What a tile's far numbers add to its sums [B, N], in float32."""
    rows, most, some = rows_of_far
    AT_ONCE: gl.constexpr = len(some)
    t = first_t + gl.arange(0, N, gl.SliceLayout(0, layout))
    x_T = x + t.to(gl.int64) * stride_x
    total = _times(some, x_T, t < T)
    for m in range(AT_ONCE, most, AT_ONCE):
        total += _times(_some(rows, m, N), x_T, t < T)
    return total


@gluon.jit
def _times(some, x_T, ok_T):
    total = _time(some[0], x_T, ok_T) + _time(some[1], x_T, ok_T)
    if len(some) > 2:
        total += _time(some[2], x_T, ok_T) + _time(some[3], x_T, ok_T)
    return total


@gluon.jit
def _time(of_row, x_T, ok_T):
    """Loads come from L2 (.cg): x was written while this program ran."""
    column_O, delta_O = of_row
    mask = (column_O >= 0)[:, None] & ok_T[None, :]
    x = gl.load(x_T[None, :] + gl.maximum(column_O, 0)[:, None], mask=mask, other=0.0, cache_modifier=".cg")
    return x.to(gl.float32) * delta_O[:, None]
