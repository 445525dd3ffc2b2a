"""What the kernels of hopper_launch.py are made of: words converted in registers, scales, split-K sums.

This module knows no tiles.

Shapes: M rows, N out, G groups of a row, of a weight's scales; J words of a row of the weight.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from specdec.ops.hopper import barrier
from specdec.ops.products.kernels.dense.stream_hopper import partial_cells, store_product
from specdec.ops.products.kernels.quantised.stream_triton import E2M1_ASM, E4M3_ASM, INT4_ASM, INT8_ASM


@gluon.jit
def whole_row(x, smem, low, K, PACK_FACTOR: gl.constexpr, SLICES: gl.constexpr, num_warps: gl.constexpr):
    """A program's columns of the only row of x, in shared memory as [STEPS * PACK_FACTOR, SLICES, 64] and perhaps more."""
    SLICE: gl.constexpr = 64 * PACK_FACTOR
    TIMES: gl.constexpr = smem.shape[0]
    AT_ONCE: gl.constexpr = smem.shape[1]
    for n in gl.static_range(TIMES):
        p = n * AT_ONCE + gl.arange(0, AT_ONCE, gl.BlockedLayout([8], [32], [num_warps], [0]))
        at = (low + p // (SLICES * SLICE)) * SLICES + p // 64 % SLICES
        column = at * SLICE + p // (64 * SLICES) % PACK_FACTOR * 64 + p % 64
        async_copy.async_copy_global_to_shared(smem.index(n), x + column, mask=column < K, cache_modifier=".cg")
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    return smem._reinterpret(
        gl.bfloat16, [TIMES * AT_ONCE // (64 * SLICES), SLICES, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )


@gluon.jit
def scales_of_rows(
    scales, tile, N, WHOLE: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """A tile's scales, if there are any of whole rows (WHOLE); else ones."""
    row_N = weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)), tile, N, BLOCK_N, PARTS)
    if WHOLE:
        return gl.load(scales + row_N, mask=row_N < PARTS * N, other=0.0).to(gl.float32)
    else:
        return gl.full([BLOCK_N], 1, gl.float32, gl.SliceLayout(1, layout))


@gluon.jit
def complete(
    acc, layout: gl.constexpr, scale, bias, y, partials, arrivals, tile, counted, first_m, split, M, N,
    WHOLE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr, PARTS: gl.constexpr,
    STORE_PARTIALS: gl.constexpr, HAS_BIAS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Multiplies by scales of whole rows, adds up the splits unless another kernel does (STORE_PARTIALS), and stores.

    counted: the number of the counter of arrivals.
    """
    if WHOLE:
        acc *= scale[:, None]
    if STORE_PARTIALS:
        y += split.to(gl.int64) * M * N
    if SPLITS == 1 or STORE_PARTIALS:
        store_product(acc, layout, bias, y, tile, first_m, M, N, split == 0, BLOCK_M, BLOCK_N, PARTS, HAS_BIAS)
    else:  # the program of this tile that arrives last sums all partial results, in a fixed order
        SIZE: gl.constexpr = BLOCK_N * BLOCK_M
        mine = partials + counted.to(gl.int64) * (SPLITS * SIZE)
        cell = partial_cells(layout, 0, BLOCK_M, BLOCK_N, BLOCK_M)
        gl.store(mine + split * SIZE + cell, acc)
        barrier()  # all of this program's stores before its arrival
        if gl.atomic_add(arrivals + counted, 1, sem="acq_rel") == SPLITS - 1:
            gl.store(arrivals + counted, 0)
            acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
            if SIZE * SPLITS <= 4096 * num_warps:  # all loads at once, from L2, since this SM's L1 may hold old data
                for s in gl.static_range(SPLITS):
                    acc += gl.load(mine + s * SIZE + cell, cache_modifier=".cg")
            else:  # all loads at once would need too many registers
                for s in range(SPLITS):
                    acc += gl.load(mine + s * SIZE + cell, cache_modifier=".cg")
            store_product(acc, layout, bias, y, tile, first_m, M, N, True, BLOCK_M, BLOCK_N, PARTS, HAS_BIAS)


@gluon.jit
def weight_rows(r, tile, N, BLOCK_N: gl.constexpr, PARTS: gl.constexpr):
    """The weight's rows that are rows r of a tile."""
    return tile * (BLOCK_N // PARTS) + r // (8 * PARTS) * 8 + r % 8 + r // 8 % PARTS * N


@gluon.jit
def rows_of_groups(tensor, tile, N, G, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """Where the scales or zero points of a tile's rows begin; rows beyond its end stand in for row 0, and are not stored."""
    row_N = weight_rows(gl.arange(0, BLOCK_N, layout), tile, N, BLOCK_N, PARTS)
    return tensor + gl.where(row_N < PARTS * N, row_N, 0).to(gl.int64) * G


@gluon.jit
def of_groups(rows, group, G):
    """The scales or zero points of a group of columns; groups beyond the last one, whose columns of x are 0, have its."""
    return gl.load(rows + gl.minimum(group, G - 1)).to(gl.float32)


@gluon.jit
def columns_of(
    places, first, PACK_FACTOR: gl.constexpr, SLICES: gl.constexpr, PADDED_M: gl.constexpr, ONE: gl.constexpr,
    right: gl.constexpr,
):  # fmt: skip
    """A step's x, 64 columns a piece, in registers; if it is one row, it stands in for all PADDED_M rows of the mma."""
    one, two = _columns(places, first, SLICES, PADDED_M, ONE, right), _columns(places, first + 1, SLICES, PADDED_M, ONE, right)
    if PACK_FACTOR == 2:
        return one, two
    else:
        three = _columns(places, first + 2, SLICES, PADDED_M, ONE, right)
        return one, two, three, _columns(places, first + 3, SLICES, PADDED_M, ONE, right)


@gluon.jit
def _columns(places, n, SLICES: gl.constexpr, PADDED_M: gl.constexpr, ONE: gl.constexpr, right: gl.constexpr):
    if ONE:
        row = places.index(n).load(gl.SliceLayout(2, right))
        return gl.expand_dims(row, 2).broadcast_to([SLICES, 64, PADDED_M])
    else:
        return places.index(n).permute((0, 2, 1)).load(right)


@gluon.jit
def piece_of(pairs, n: gl.constexpr, PACK_FACTOR: gl.constexpr, left: gl.constexpr):
    """The words of 64 columns, of a slice's pairs of words."""
    part = half_of(pairs, n // (PACK_FACTOR // 2))
    if PACK_FACTOR == 4:
        part = half_of(part, n % 2)
    return words_of(part, left)


@gluon.jit
def words_of(pairs, left: gl.constexpr):
    """The words of pairs of words."""
    words = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16))
    shape: gl.constexpr = [pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]]
    return gl.convert_layout(gl.reshape(words, shape), left, assert_trivial=True)


@gluon.jit
def half_of(pairs, n: gl.constexpr):
    """The first or second half of the last dim."""
    halves = gl.reshape(pairs, [pairs.shape[0], pairs.shape[1], 2, pairs.shape[2] // 2])
    first, second = gl.split(gl.permute(halves, (0, 1, 3, 2)))
    return first if n == 0 else second


@gluon.jit
def convert_words(
    words, zero_point, layout: gl.constexpr, KIND: gl.constexpr, HAS_ZERO_POINTS: gl.constexpr, STEP: gl.constexpr
):  # fmt: skip
    """The unscaled values of words, [..., STEP] for [..., J], as the first operand of the tensor cores.

    A word's values are 16 columns apart (see formats/quantised.py), and a register's pairs stay where they are.
    """
    RANK: gl.constexpr = len(words.shape)
    if HAS_ZERO_POINTS:
        zero_point = gl.expand_dims(zero_point, RANK - 1)
    if KIND == "int4" or KIND == "e2m1":
        if KIND == "e2m1":
            a, b, c, d = gl.inline_asm_elementwise(
                E2M1_ASM, "=r,=r,=r,=r,r", [words], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True,
                pack=2,
            )  # fmt: skip
        else:
            middle = gl.full(words.shape, 136, gl.bfloat16, words.type.layout)
            if HAS_ZERO_POINTS:
                middle = (zero_point + 136).to(gl.bfloat16).broadcast_to(words.shape)
            a, b, c, d = gl.inline_asm_elementwise(
                INT4_ASM, "=r,=r,=r,=r,r,r,r", [words, middle, middle],
                dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        return four_pieces(a, b, c, d, layout, STEP)
    else:
        PROGRAM: gl.constexpr = E4M3_ASM if KIND == "e4m3" else INT8_ASM
        a, b = gl.inline_asm_elementwise(PROGRAM, "=r,=r,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
        if HAS_ZERO_POINTS:
            a, b = a - zero_point.to(gl.bfloat16), b - zero_point.to(gl.bfloat16)
        if RANK == 2:
            both = gl.permute(gl.reshape(gl.join(a, b), [words.shape[0], STEP // 32, 16, 2]), (0, 1, 3, 2))
        else:
            both = gl.reshape(gl.join(a, b), [words.shape[0], words.shape[1], STEP // 32, 16, 2])
            both = gl.permute(both, (0, 1, 2, 4, 3))
        return _in_order(both, layout, STEP)


@gluon.jit
def four_pieces(a, b, c, d, layout: gl.constexpr, STEP: gl.constexpr):
    """Values of words of four: the first 16 columns of each run of 64, the next, and so on."""
    both = gl.join(
        gl.join(a, c), gl.join(b, d)
    )  # the last two dims: the lower and the upper bit of a value's place in its word
    if len(a.shape) == 2:
        both = gl.permute(gl.reshape(both, [a.shape[0], STEP // 64, 16, 2, 2]), (0, 1, 3, 4, 2))
    else:
        both = gl.permute(gl.reshape(both, [a.shape[0], a.shape[1], STEP // 64, 16, 2, 2]), (0, 1, 2, 4, 5, 3))
    return _in_order(both, layout, STEP)


@gluon.jit
def _in_order(values, layout: gl.constexpr, STEP: gl.constexpr):
    """Values whose columns are the last dims, as one dim and as the first operand of the tensor cores."""
    if len(layout.warps_per_cta) == 2:
        flat = gl.reshape(values, [values.shape[0], STEP])
    else:
        flat = gl.reshape(values, [values.shape[0], values.shape[1], STEP])
    return gl.convert_layout(flat, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
