"""The tiles of products with weights of 8 or 4 bits, chosen by shapes alone.

The numbers of packed weights are in ops/products/tiles/lossless.py, and become tiles here.
Most were measured on an H200, for some numbers of rows: benchmarks/products/README.md, "Weights in 8 and 4 bits".  This
module knows no tensor and no model.

Shapes: M rows, K in, N out.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Literal, NamedTuple

from specdec.ops.products.formats.quantised import Kind, pack_factor_of
from specdec.ops.products.tiles.dense import SMS

MAX_TILES = 1024  # of a split product: as many as there are counters of arrivals
FEW = 64  # threshold in rows of x: tiles of more are chosen by waves, and left to cuBLAS where the Hopper kernels don't run
MANY_PLAIN, MANY = 2048, 512  # thresholds in rows of x: more are left to cuBLAS, with a scale for each row and for groups
WIDE, LONG = 16384, 8192  # thresholds in rows and in columns of the weight
# The kinds, columns of a scale and zeros whose products by the Hopper kernels were held against float64 on a GPU.
SEEN: tuple[tuple[Kind, int, bool], ...] = (
    ("e4m3", 0, False), ("e4m3", 128, False), ("int8", 0, False), ("int8", 128, False), ("int4", 0, False),
    ("int4", 128, False), ("int4", 128, True),
)  # fmt: skip
SHARED = 220_000  # bytes of shared memory that a program may have, less some for barriers and sums
ALONE = 8  # threshold in rows of x: more are multiplied by four warps together
LOADERS, LOADER = 4, 24  # warps that the loading warp counts for, and registers that a thread of it keeps


Kernel = Literal["stream_triton", "warp_hopper", "warpgroup_hopper"]  # files of kernels/quantised/


class QuantisedTiles(NamedTuple):
    """Which kernel computes a product, and what one program of it works on.

    kernel: warp_hopper multiplies with each warp alone, warpgroup_hopper with four together (wgmma).
    block_m: rows of x (padded): a power of two, or the sum of two.
    block_n: rows of the weight.
    block_k: columns of a step.
    splits: programs that share a tile's columns.
    warps: that multiply.
    stages: steps whose codes are in shared memory at one time.
    slices: groups of warps that take different columns (of a step in warp_hopper, steps in turn in warpgroup_hopper); others
        take different rows.
    registers: of a thread, before the loading warp's are given to the others.

    Of stream_triton, which other GPUs run too, slices and registers say nothing.
    """

    kernel: Kernel
    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    slices: int = 1
    registers: int = 0

    @property
    def of_program(self) -> int:
        """Tiles of the weight that a program's groups of four warps take."""
        return 1 if self.kernel == "warp_hopper" else self.warps // 4 // self.slices

    @property
    def others(self) -> int:
        """Registers of a thread of a second group of four warps: as many as the first has, and no more than a GPU allows."""
        warps = self.warps + LOADERS
        return min(256, (self.registers * warps - LOADER * LOADERS) // self.warps // 8 * 8)


Numbers = tuple[int, int, int, int, int, int, int]  # as the tables below name them
# By codes of a word, rows of x and a weight's shape: block_n, block_k (0: slices'), splits, warps, stages, slices, registers.
MEASURED: dict[int, dict[int, dict[str, Numbers]]] = {
    2: {
        1: {"square": (16, 0, 1, 4, 5, 4, 64), "tall": (16, 0, 1, 4, 5, 4, 64), "wide": (128, 0, 1, 4, 5, 1, 128),
            "long": (16, 0, 1, 4, 8, 4, 80)},
        8: {"square": (16, 0, 1, 4, 4, 4, 64), "tall": (32, 0, 1, 8, 4, 4, 80), "wide": (128, 0, 1, 4, 5, 1, 80),
            "long": (32, 0, 1, 8, 8, 4, 80)},
        16: {"square": (64, 256, 2, 8, 4, 2, 80), "tall": (64, 256, 2, 8, 4, 2, 80), "wide": (128, 128, 1, 8, 4, 1, 80),
             "long": (64, 256, 2, 8, 6, 2, 128)},
        32: {"square": (64, 256, 2, 4, 4, 1, 80), "tall": (64, 256, 1, 8, 5, 2, 128), "wide": (128, 128, 1, 8, 4, 1, 80),
             "long": (64, 256, 2, 8, 6, 2, 128)},
        64: {"square": (64, 128, 2, 8, 6, 2, 128), "tall": (64, 128, 1, 8, 6, 2, 128), "wide": (128, 128, 1, 8, 3, 1, 80),
             "long": (64, 128, 2, 8, 6, 2, 128)},
    },
    4: {
        1: {"square": (32, 0, 2, 4, 4, 2, 80), "tall": (16, 0, 1, 4, 2, 4, 64), "wide": (64, 0, 1, 4, 3, 1, 64),
            "long": (32, 0, 3, 4, 3, 2, 80)},
        8: {"square": (32, 0, 2, 4, 3, 2, 80), "tall": (16, 0, 1, 4, 2, 4, 64), "wide": (128, 0, 1, 8, 3, 1, 80),
            "long": (64, 0, 4, 8, 3, 2, 80)},
        16: {"square": (64, 256, 2, 8, 4, 2, 80), "tall": (64, 256, 2, 8, 4, 2, 80), "wide": (128, 256, 1, 8, 3, 1, 80),
             "long": (64, 256, 4, 8, 4, 2, 80)},
        32: {"square": (64, 256, 2, 8, 4, 2, 128), "tall": (64, 256, 1, 8, 6, 2, 128), "wide": (128, 256, 1, 4, 2, 1, 128),
             "long": (64, 256, 2, 8, 6, 2, 128)},
        64: {"square": (64, 128, 2, 8, 6, 2, 128), "tall": (64, 128, 1, 8, 6, 2, 128), "wide": (256, 128, 1, 8, 5, 1, 168),
             "long": (64, 128, 2, 8, 6, 2, 128)},
    },
}  # fmt: skip
WIDE_GROUPED_64 = (256, 128, 1, 8, 4, 1, 168)  # of codes of 8 bits: with scales of groups the tiles above would spill registers
# Tiles for more than FEW rows, by rows of x and of the weight, as above.
SIZES: dict[tuple[int, int], Numbers] = {
    (64, 256): (256, 128, 1, 8, 4, 1, 168),
    (96, 64): (64, 128, 1, 4, 4, 1, 128), (96, 128): (128, 128, 1, 8, 4, 1, 168), (96, 256): (256, 128, 1, 8, 3, 1, 168),
    (128, 64): (64, 128, 1, 4, 4, 1, 128), (128, 128): (128, 128, 1, 8, 4, 1, 168), (128, 256): (256, 128, 1, 8, 3, 1, 168),
    (192, 64): (64, 128, 1, 4, 3, 1, 144), (192, 128): (128, 128, 1, 8, 3, 1, 168),
}  # fmt: skip
# By codes of a word and whether groups have scales: microseconds that a wave of programs, one an SM, takes for PASS columns of
# the weight.  A thread that holds two sums has no registers for 256 rows but with 64 of x; one that holds one gains nothing by
# these.
PASS = 4096
WAVES: dict[tuple[int, bool], dict[tuple[int, int], float]] = {
    (2, False): {(96, 64): 17.4, (96, 128): 26, (96, 256): 47, (128, 64): 19.7, (128, 128): 26, (128, 256): 47.5,
                 (192, 64): 23.6, (192, 128): 36},
    (2, True): {(96, 64): 19.2, (96, 128): 28, (128, 64): 22.5, (128, 128): 32.5, (64, 256): 40, (192, 64): 26.4,
                (192, 128): 42},
    (4, False): {(96, 64): 14.4, (96, 128): 22, (96, 256): 40, (128, 64): 17.5, (128, 128): 23.5, (128, 256): 44.5,
                 (192, 64): 21.6, (192, 128): 34},
    (4, True): {(96, 64): 16.1, (96, 128): 25, (128, 64): 20.5, (128, 128): 29.5, (64, 256): 33, (192, 64): 24.5,
                (192, 128): 40.7},
}  # fmt: skip
# Microseconds for a million sums of splits: where a norm adds them up, and where the last program of a tile does.
US_OF_PARTIALS, US_OF_SUMS = 2.0, 6.0


@cache
def hopper_tiles(
    M: int, N: int, K: int, kind: Kind, group: int, zeros: bool, gated: bool, partials: bool = False
) -> QuantisedTiles | None:
    """Tiles of hopper_launch.py's kernels for M rows and a weight of N rows (gate's and up's) and K columns; None: another one.

    group: columns of a scale, 0: all.  zeros: whether there are zeros.  partials: whether a norm adds up splits.  Products
    of at most FEW rows and other shapes than the measured ones take the tiles of the most similar one.
    """
    a_word = pack_factor_of(kind)
    if (
        not 0 < M <= (MANY if group else MANY_PLAIN)
        or (kind, group, zeros) not in SEEN
        or N % (16 if gated else 8)
        or K % (64 * a_word)
    ):
        return None
    if M > FEW:
        return by_waves(M, N, K, a_word, group > 0, partials)
    block_m, shape = tile_rows(M), shape_of(N, K)
    numbers = MEASURED[a_word][block_m][shape]
    if group and a_word == 2 and block_m == 64 and shape == "wide":
        numbers = WIDE_GROUPED_64
    return fitted(M, N, K, numbers, a_word, 16 // a_word)


def by_waves(M: int, N: int, K: int, a_word: int, grouped: bool, partials: bool) -> QuantisedTiles:
    """The tiles with the shortest waves: each starts when all programs of the one before have ended."""
    waves = WAVES[a_word, grouped]

    def us(size: tuple[int, int], splits: int) -> float:
        tiles_m, tiles = _parts(M, size[0]), _parts(M, size[0]) * _parts(N, size[1])
        sums = tiles_m * size[0] * N * splits / 1e6 if splits > 1 else 0
        return (
            _parts(tiles * splits, SMS) * waves[size] * K / PASS / splits + (US_OF_PARTIALS if partials else US_OF_SUMS) * sums
        )

    def may(size: tuple[int, int], splits: int) -> bool:
        if splits == 1:
            return True
        halves = 2 * _parts(M, size[0]) * _parts(N, size[1])  # of tiles: two groups of warps count apart
        is_counted = partials or size[0] in (64, 128)  # hopper_launch.py counts no arrivals at a tile of two parts
        return is_counted and halves <= MAX_TILES and K >= 2 * splits * SIZES[size][1]

    size, splits = min((each for each in product(waves, (1, 2, 3, 4)) if may(*each)), key=lambda each: us(*each))
    block_n, block_k, _, warps, stages, slices, registers = SIZES[size]
    return QuantisedTiles("warpgroup_hopper", size[0], block_n, block_k, splits, warps, stages, slices, registers)


def tile_rows(M: int) -> int:
    """Rows of a tile of x that holds M rows."""
    return 1 if M == 1 else max(8, 1 << (M - 1).bit_length())


def shape_of(N: int, K: int) -> str:
    """The measured shape of weight that this one is most like."""
    return "wide" if N >= WIDE else "long" if K > LONG else "square" if N <= 4096 else "tall"


def fitted(M: int, N: int, K: int, numbers: Numbers, a_word: int, bits: int) -> QuantisedTiles:
    """Measured numbers as tiles for this weight, with no more stages than fit.  bits: of a number of the weight."""
    block_m = tile_rows(M)
    block_n, block_k, splits, warps, stages, slices, registers = numbers
    alone = block_m <= ALONE
    block_k = 64 * slices * a_word if alone else block_k
    if not alone and K <= block_k:  # too few steps to take turns; a group of warps holds sums of at most 128 rows
        warps, slices = 4 * _parts(block_n, 128), 1
    kernel: Kernel = "warp_hopper" if alone else "warpgroup_hopper"
    tiles = QuantisedTiles(kernel, block_m, block_n, block_k, 1, warps, stages, slices, registers)
    count, steps = _parts(N, block_n) * tiles.of_program, _parts(K, block_k)
    if N > 8192 or count > MAX_TILES:
        splits = 1
    splits = max(1, min(splits, steps // 2))
    stage = block_k * block_n * bits // 8 + (2 * block_k * block_m if M > 1 else 0)
    row = 2 * _parts(K, splits) + 1024 * warps if M == 1 else 0
    return tiles._replace(splits=splits, stages=max(2, min(stages, (SHARED - row) // stage)))


def _parts(whole: int, size: int) -> int:
    return -(-whole // size)


@cache
def quantised_tiles(M: int, N: int, K: int, kind: Kind) -> QuantisedTiles | None:
    """The kernel's tiles for M rows and a weight of N rows and K columns; None: the weight is converted, and cuBLAS is used."""
    if not 0 < M <= FEW:
        return None
    block_m = max(8, 1 << (M - 1).bit_length())
    few = _of_4_bits if pack_factor_of(kind) == 4 else _of_8_bits
    tiles = few(block_m, N, K) if block_m <= 16 else _of_more_rows(block_m, N, K, kind)
    count = -(-N // tiles.block_n)
    splits = tiles.splits if count <= MAX_TILES else 1
    return tiles._replace(splits=min(splits, -(-K // tiles.block_k)))


_stream = partial(QuantisedTiles, "stream_triton")


def _of_8_bits(block_m: int, N: int, K: int) -> QuantisedTiles:
    if N >= WIDE:
        return _stream(block_m, 128, 256, 1, 8, 3)
    if K > LONG:
        return _stream(block_m, 64, 256, 4, 2, 5)
    return _stream(block_m, 32, 256, 4, 2, 5) if N <= 4096 else _stream(block_m, 64, 256, 1, 4, 5)


def _of_4_bits(block_m: int, N: int, K: int) -> QuantisedTiles:
    if N < WIDE and K > LONG:
        return _stream(block_m, 32, 256, 4, 2, 3)
    return _stream(block_m, 32, 256, 2 if N <= 4096 else 1, 2, 6)


def _of_more_rows(block_m: int, N: int, K: int, kind: Kind) -> QuantisedTiles:
    """17 to 64 rows.  Splits give every SM a program or two."""
    if N >= WIDE and pack_factor_of(kind) == 2 and block_m <= 32:
        return _stream(block_m, 128, 256, 1, 8, 3)
    return _stream(block_m, 64, 128, min(4, max(1, 2 * SMS // -(-N // 64))), 4, 4)
