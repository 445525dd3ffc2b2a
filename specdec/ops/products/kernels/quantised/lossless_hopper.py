"""Lossless 12-bit weights as values in registers, and products with their outliers, written in Gluon for Hopper GPUs.

The words of 8 bits and of 4 lie as those of quantised weights do (ops/products/formats/quantised.py), so that a register of
each holds a pair of words, and a pair of values takes four instructions without moving one past another.  Looking for outliers
there would double the work, so the words are multiplied as if there were none, and what a tile's outliers add is computed
apart: while the first columns of x come from L2, these threads read the few values of x that the lists ask for.

This module knows no tiles.

Shapes: M rows of x, N out; B rows of the weight in a tile, BLOCK_M rows of x that it is multiplied with.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specdec.ops.products.kernels.quantised.parts_hopper import four_pieces, weight_rows


def _program() -> str:
    """PTX for two words of 8 bits of 32 columns ($4) and of the next 32 ($5), two of 4 bits ($6), and the base ($7).

    $0 to $3: two values each, of 16 columns after each other.
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
def bases_of_rows(bases, tile, N, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """The bases of a tile's rows; rows beyond its end have that of row 0, and are not stored."""
    row_N = weight_rows(gl.arange(0, BLOCK_N, layout), tile, N, BLOCK_N, PARTS)
    return gl.load(bases + gl.where(row_N < PARTS * N, row_N, 0))


@gluon.jit
def convert_lossless(low, high, base, layout: gl.constexpr, STEP: gl.constexpr):
    """The values of words, [..., STEP] for [..., STEP / 2] of 8 bits and [..., STEP / 4] of 4, as a product's first operand.

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
def outliers_of_tile(
    bases, starts, columns, outliers, most, tile, share, N, SHARES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """What is known of a tile's outliers before x exists.  layout: of the tile's sums [B, BLOCK_M].

    share: of SHARES, which add up the tile's sums: each takes some of each row's outliers.
    """
    row_N = weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)), tile, N, BLOCK_N, PARTS)
    ok_N = row_N < PARTS * N
    row_N = gl.where(ok_N, row_N, 0)
    first_N = gl.load(starts + row_N)
    all_N = gl.where(ok_N, gl.load(starts + row_N + 1) - first_N, 0)
    first_N += all_N * share // SHARES
    count_N = all_N * (share + 1) // SHARES - all_N * share // SHARES
    base_N = gl.load(bases + row_N).to(gl.bfloat16, bitcast=True).to(gl.float32)
    rows = (columns + first_N, outliers + first_N, count_N, base_N)
    return rows, gl.cdiv(_max_count(most, tile, N, BLOCK_N, PARTS), SHARES), _several(rows, 0, BLOCK_M)


@gluon.jit
def _max_count(most, tile, N, BLOCK_N: gl.constexpr, PARTS: gl.constexpr):
    """The most outliers that a row of the tile has.

    It is not computed of the rows' counts, since the warps would have to compare theirs through shared memory.  Triton 3.6 put
    that where a barrier of the kernel had been, and kernels whose programs share an SM then ran without end now and then.
    """
    found = 0
    for n in gl.static_range(BLOCK_N // 8):
        row = tile * (BLOCK_N // PARTS) + n // PARTS * 8
        found = gl.maximum(found, gl.load(most + (row + n % PARTS * N) // 8, mask=row < N, other=0))
    return found


@gluon.jit
def _several(rows, n, BLOCK_M: gl.constexpr):
    """As many of each row's outliers as are read together: each takes registers for BLOCK_M rows of x."""
    if BLOCK_M <= 16:
        return _outlier(rows, n), _outlier(rows, n + 1), _outlier(rows, n + 2), _outlier(rows, n + 3)
    else:
        return _outlier(rows, n), _outlier(rows, n + 1)


@gluon.jit
def _outlier(rows, n):
    """Each row's outlier number n: its column, and what it differs by from what the words say; -1 and 0 if there is none."""
    columns_N, outliers_N, count_N, base_N = rows
    column_N = gl.load(columns_N + n, mask=n < count_N, other=-1)
    outlier_N = gl.load(outliers_N + n, mask=n < count_N, other=0).to(gl.bfloat16, bitcast=True).to(gl.float32)
    return column_N, gl.where(n < count_N, outlier_N - base_N, 0.0)


@gluon.jit
def outlier_products(tile_outliers, x, stride_x, first_m, M, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """What a tile's outliers add to its sums [B, BLOCK_M], in float32."""
    rows, most, some = tile_outliers
    AT_ONCE: gl.constexpr = len(some)
    m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    x_M = x + m.to(gl.int64) * stride_x
    total = _times(some, x_M, m < M)
    for n in range(AT_ONCE, most, AT_ONCE):
        total += _times(_several(rows, n, BLOCK_M), x_M, m < M)
    return total


@gluon.jit
def _times(some, x_M, ok_M):
    total = _time(some[0], x_M, ok_M) + _time(some[1], x_M, ok_M)
    if len(some) > 2:
        total += _time(some[2], x_M, ok_M) + _time(some[3], x_M, ok_M)
    return total


@gluon.jit
def _time(of_row, x_M, ok_M):
    """Loads come from L2 (.cg): x was written while this program ran."""
    column_N, delta_N = of_row
    mask = (column_N >= 0)[:, None] & ok_M[None, :]
    x = gl.load(x_M[None, :] + gl.maximum(column_N, 0)[:, None], mask=mask, other=0.0, cache_modifier=".cg")
    return x.to(gl.float32) * delta_N[:, None]
