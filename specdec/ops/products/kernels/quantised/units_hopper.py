"""What the kernels of few_hopper.py are made of: words of experts in registers, their products, and sums over slices.

A unit is 64 bytes of a row of a matrix: 128 columns in 4 bits, 64 in 8.  A warp takes units of BLOCK_N rows by itself:
a thread loads 16 bytes of each of its rows, and these are exactly the values that the tensor cores' instruction (mma) expects
of it, if 32 columns are taken in another order: thread t of four has columns 8t to 8t + 7.  Columns of x are loaded in the same
order, and a sum does not depend on it.  So no word passes through shared memory, nothing waits for another warp, and the loads
of several units are on their way at one time.

The warps of a program (slices) share its units: they are numbered over all matrices that the program multiplies with, one after
the other, and each warp has a run of them.  This module knows no expert's choice and no tiles.

Shapes: S slices, N rows of a tile, M = 8 rows of x, K columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from specdec.ops.products.kernels.experts.convert_triton import E2M1_ASM, E4M3_ASM, ENLARGE_ASM
from specdec.ops.products.kernels.quantised.parts_hopper import words_of
from specdec.ops.products.kernels.quantised.stream_triton import INT4_ASM


@gluon.jit
def own_expert(expert_S, place_S, mask_S, low_S, CHUNK: gl.constexpr):
    """The units of slices that have one expert each: CHUNK units from low_S on, of which those beyond a row do not exist."""
    return expert_S, place_S, mask_S, low_S, CHUNK


@gluon.jit
def _unit(slices, i, UNITS: gl.constexpr, LISTED: gl.constexpr):
    """(expert, number in a row, place in x, mask of tokens) of unit i of each slice, [S] each; a unit without tokens is none.

    slices: what `own_expert` gives; if LISTED (entries, first, end) instead: words of experts (from bit 16 on), of their places
    in x (8 to 15) and of masks (0 to 7); the numbers of units over all entries, [S].
    """
    if LISTED:
        at_S = slices[1] + i
        ok_S = at_S < slices[2]
        number_S = at_S // UNITS
        word_S = gl.load(slices[0] + number_S, mask=ok_S, other=0)
        return word_S >> 16, at_S - number_S * UNITS, word_S >> 8 & 255, word_S & 255
    else:
        expert_S, place_S, mask_S, low_S, chunk = slices
        unit_S = low_S + i
        return expert_S, unit_S, place_S, gl.where((i < chunk) & (unit_S < UNITS), mask_S, 0)


@gluon.jit
def load_units(
    qweight, scales, row_N, slices, i, COUNT: gl.constexpr, ROWS: gl.constexpr, UNITS: gl.constexpr, G: gl.constexpr,
    GROUP_UNITS: gl.constexpr, LISTED: gl.constexpr, words_layout: gl.constexpr, scales_layout: gl.constexpr,
):  # fmt: skip
    """Of COUNT units from unit i on: words [S, N, 16], scales [S, N], and (numbers in a row, places in x, masks).

    row_N: a tile's rows of a matrix, in the layouts of words and of scales.
    """
    words, scale, place = _load_unit(
        qweight, scales, row_N, slices, i, ROWS, UNITS, G, GROUP_UNITS, LISTED, words_layout, scales_layout
    )
    all_words, all_scales, places = (words,), (scale,), (place,)
    for n in gl.static_range(1, COUNT):
        words, scale, place = _load_unit(
            qweight, scales, row_N, slices, i + n, ROWS, UNITS, G, GROUP_UNITS, LISTED, words_layout, scales_layout
        )
        all_words, all_scales = all_words + (words,), all_scales + (scale,)  # type: ignore[assignment]
        places = places + (place,)  # type: ignore[assignment]
    return all_words, all_scales, places


@gluon.jit
def _load_unit(
    qweight, scales, row_N, slices, i, ROWS: gl.constexpr, UNITS: gl.constexpr, G: gl.constexpr, GROUP_UNITS: gl.constexpr,
    LISTED: gl.constexpr, words_layout: gl.constexpr, scales_layout: gl.constexpr,
):  # fmt: skip
    expert_S, unit_S, place_S, mask_S = _unit(slices, i, UNITS, LISTED)
    ok_S = mask_S > 0
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, words_layout)))
    words_S = qweight + (expert_S.to(gl.int64) * (ROWS * UNITS * 16) + unit_S * 16)
    at_SN = words_S[:, None, None] + (row_N[0] * (UNITS * 16))[None, :, None]
    words = gl.load(at_SN + j[None, None, :], mask=ok_S[:, None, None], other=0, eviction_policy="evict_first")
    slices_layout: gl.constexpr = gl.SliceLayout(1, scales_layout)
    scales_S = scales + (expert_S.to(gl.int64) * (ROWS * G) + unit_S // GROUP_UNITS)
    scales_S = gl.convert_layout(scales_S, slices_layout, assert_trivial=True)
    ok_S = gl.convert_layout(ok_S.to(gl.int32), slices_layout, assert_trivial=True) > 0
    scale = gl.load(scales_S[:, None] + (row_N[1] * G)[None, :], mask=ok_S[:, None], other=0)
    return words, scale, (unit_S, place_S, mask_S)


@gluon.jit
def load_columns(
    x, stride_x, stride_place, place, K: gl.constexpr, FOUR: gl.constexpr, ONE: gl.constexpr, ENLARGES: gl.constexpr,
    x_layout: gl.constexpr,
):  # fmt: skip
    """A unit's columns of x, 32 a tile; 0 beyond the last one, and of tokens that did not choose the expert."""
    WIDTH: gl.constexpr = 128 if FOUR else 64
    of_slices: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1 if ONE else 2, x_layout))
    column_S = gl.convert_layout(place[0] * WIDTH, of_slices, assert_trivial=True)
    base_S = x + gl.convert_layout(place[1] * stride_place, of_slices, assert_trivial=True)
    mask_S = gl.convert_layout(place[2], of_slices, assert_trivial=True)
    one = _tile(base_S, column_S, mask_S, stride_x, K, ONE, ENLARGES, x_layout)
    two = _tile(base_S, column_S + 32, mask_S, stride_x, K, ONE, ENLARGES, x_layout)
    if FOUR:
        three = _tile(base_S, column_S + 64, mask_S, stride_x, K, ONE, ENLARGES, x_layout)
        return one, two, three, _tile(base_S, column_S + 96, mask_S, stride_x, K, ONE, ENLARGES, x_layout)
    else:
        return one, two


@gluon.jit
def _tile(
    base_S, column_S, mask_S, stride_x, K: gl.constexpr, ONE: gl.constexpr, ENLARGES: gl.constexpr, x_layout: gl.constexpr
):  # fmt: skip
    """[S, M, 32]; of the only token [S, 32]."""
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, x_layout)))
    ok_S = column_S < K
    if ONE:
        tile = gl.load((base_S + column_S)[:, None] + k[None, :], mask=(ok_S & (mask_S > 0))[:, None], other=0.0)
    else:
        m = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, x_layout)))
        ok_SM = ok_S[:, None, None] & ((mask_S[:, None, None] >> m[None, :, None] & 1) > 0)
        at_SM = (base_S + column_S)[:, None, None] + (m * stride_x)[None, :, None]
        tile = gl.load(at_SM + k[None, None, :], mask=ok_SM, other=0.0)
    if ENLARGES:
        tile = gl.inline_asm_elementwise(ENLARGE_ASM, "=r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=2)
    return tile


@gluon.jit
def _right(tile, ONE: gl.constexpr, layout: gl.constexpr):
    """A tile of x as the second operand of the tensor cores, [S, 32, M]; of one token, all columns are its."""
    S: gl.constexpr = tile.shape[0]
    if ONE:
        tile = gl.expand_dims(tile, 1).broadcast_to([S, 8, 32])
    parts = gl.permute(gl.reshape(tile, [S, 8, 4, 2, 2, 2]), (0, 3, 4, 2, 5, 1))
    return gl.convert_layout(gl.reshape(parts, [S, 32, 8]), gl.DotOperandLayout(1, layout, 2), assert_trivial=True)


@gluon.jit
def add_unit(
    acc, words, tiles, scale, layout: gl.constexpr, KIND: gl.constexpr, ONE: gl.constexpr
):  # fmt: skip
    """acc [S, N, M] plus a unit's products."""
    S: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    ordered = gl.reshape(gl.permute(gl.reshape(words, [S, N, 4, 2, 2]), (0, 1, 3, 4, 2)), [S, N, 16])
    pairs = words_of(ordered, left)
    none = gl.zeros([S, N, 8], gl.float32, layout)
    if KIND == "e4m3":
        a, b = gl.inline_asm_elementwise(E4M3_ASM, "=r,=r,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
        part = mma_v2(b, _right(tiles[1], ONE, layout), mma_v2(a, _right(tiles[0], ONE, layout), none))
        acc += part * scale.to(gl.float32)[:, :, None]
    elif KIND == "e2m1":
        a, b, c, d = gl.inline_asm_elementwise(
            E2M1_ASM, "=r,=r,=r,=r,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
        acc += mma_v2(a, _right(tiles[0], ONE, layout), none) * _power(scale << 23)
        acc += mma_v2(b, _right(tiles[1], ONE, layout), none) * _power(scale << 15)
        acc += mma_v2(c, _right(tiles[2], ONE, layout), none) * _power(scale << 7)
        acc += mma_v2(d, _right(tiles[3], ONE, layout), none) * _power(scale >> 1)
    else:
        middle = gl.full([S, N, 32], 136, gl.bfloat16, left)
        a, b, c, d = gl.inline_asm_elementwise(
            INT4_ASM, "=r,=r,=r,=r,r,r,r", [pairs, middle, middle],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        part = mma_v2(b, _right(tiles[1], ONE, layout), mma_v2(a, _right(tiles[0], ONE, layout), none))
        other = mma_v2(d, _right(tiles[3], ONE, layout), mma_v2(c, _right(tiles[2], ONE, layout), none))
        acc += (part + other) * scale.to(gl.float32)[:, :, None]
    return acc


@gluon.jit
def _power(bits):
    """2^(e - 127) of an exponent that lies where float32 has it; 0 in place of 2^-127, which is no normal number."""
    return (bits & 0x7F800000).to(gl.float32, bitcast=True)[:, :, None]


@gluon.jit
def sums_of_units(
    x, stride_x, stride_place, qweight, scales, row_N, slices, runs, loaded,
    K: gl.constexpr, ROWS: gl.constexpr, UNITS: gl.constexpr, G: gl.constexpr, GROUP_UNITS: gl.constexpr,
    KIND: gl.constexpr, LISTED: gl.constexpr, ONE: gl.constexpr, ENLARGES: gl.constexpr,
    AHEAD: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr, words_layout: gl.constexpr, x_layout: gl.constexpr,
):  # fmt: skip
    """[N, M] float32: the sum over all units of the program.

    runs: of AHEAD units, that a slice has at most.  loaded: what `load_units` gave for the first run.
    """
    FOUR: gl.constexpr = KIND != "e4m3"
    SLICES: gl.constexpr = gl.num_warps()
    acc = gl.zeros([SLICES, BLOCK_N, 8], gl.float32, layout)
    words, scale, places = loaded
    _loads_stay_in_front()
    for run in range(1, runs):
        next_words, next_scale, next_places = load_units(
            qweight, scales, row_N, slices, run * AHEAD, AHEAD, ROWS, UNITS, G, GROUP_UNITS, LISTED, words_layout,
            gl.SliceLayout(2, layout),
        )  # fmt: skip
        _loads_stay_in_front()
        acc = _add_run(
            acc, x, stride_x, stride_place, words, scale, places, K, KIND, FOUR, ONE, ENLARGES, AHEAD, layout, x_layout
        )  # fmt: skip
        words, scale, places = next_words, next_scale, next_places
    acc = _add_run(
        acc, x, stride_x, stride_place, words, scale, places, K, KIND, FOUR, ONE, ENLARGES, AHEAD, layout, x_layout
    )  # fmt: skip
    total = gl.sum(acc, axis=0)
    if KIND == "e2m1":
        total *= 4.611686018427388e18  # 2^(126 - 64): what the places of quantised values' bits and LARGE have multiplied by
    elif KIND == "e4m3":
        total *= 7.205759403792794e16  # 2^(120 - 64)
    return total


@gluon.jit
def _loads_stay_in_front():
    """Keeps the assembler from moving loads to where their words are needed, which saves registers and waits for each load."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add_run(
    acc, x, stride_x, stride_place, words, scale, places, K: gl.constexpr, KIND: gl.constexpr, FOUR: gl.constexpr,
    ONE: gl.constexpr, ENLARGES: gl.constexpr, AHEAD: gl.constexpr, layout: gl.constexpr,
    x_layout: gl.constexpr,
):  # fmt: skip
    """acc plus the products of AHEAD units; a unit's columns of x are loaded while the unit before is multiplied."""
    tiles = load_columns(x, stride_x, stride_place, places[0], K, FOUR, ONE, ENLARGES, x_layout)
    for n in gl.static_range(AHEAD):
        now = tiles
        if n + 1 < AHEAD:
            tiles = load_columns(x, stride_x, stride_place, places[n + 1], K, FOUR, ONE, ENLARGES, x_layout)
        acc = add_unit(acc, words[n], now, scale[n], layout, KIND, ONE)
    return acc
