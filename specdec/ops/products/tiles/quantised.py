"""The tiles of products with weights of 8 or 4 bits, chosen by shapes alone.

The measured sizes of lossless weights are in ops/products/tiles/lossless.py, and become tiles here.
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
MAX_M, MAX_M_GROUPED = 2048, 512  # thresholds in rows of x: more are left to cuBLAS, with a scale for each row and for groups
LARGE_N, LARGE_K = 16384, 8192  # thresholds in rows and in columns of the weight
# The kinds, columns of a scale, and whether there are zero points, whose products by the Hopper kernels were held against
# float64 on a GPU.
SEEN: tuple[tuple[Kind, int, bool], ...] = (
    ("e4m3", 0, False), ("e4m3", 128, False), ("int8", 0, False), ("int8", 128, False), ("int4", 0, False),
    ("int4", 128, False), ("int4", 128, True),
)  # fmt: skip
SHARED = 220_000  # bytes of shared memory that a program may have, less some for barriers and sums
MAX_WARP_M = 8  # threshold in rows of x: more are multiplied by warpgroups (wgmma), not by each warp (mma)
PRODUCER_WARPS, PRODUCER_REGISTERS = 4, 24  # warps that the producer warp counts for, and registers that a thread of it keeps


Kernel = Literal["stream_triton", "warp_hopper", "warpgroup_hopper"]  # files of kernels/quantised/


class QuantisedTiles(NamedTuple):
    """Which kernel computes a product, and what one program of it works on.

    kernel: warp_hopper multiplies with each warp alone (mma), warpgroup_hopper with the four warps of a warpgroup (wgmma).
    block_m: rows of x (padded): a power of two, or the sum of two.
    block_n: rows of the weight.
    block_k: columns of a step.
    splits: programs that share a tile's columns.
    warps: consumer warps, which multiply.
    stages: steps whose words are in shared memory at one time.
    slices: groups of warps that take different columns (of a step in warp_hopper, steps in turn in warpgroup_hopper); groups
        beyond these take different rows.
    registers: of a thread, before the producer warp gives its own to the consumer warps.

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
        """Tiles of the weight that a program's warpgroups take."""
        return 1 if self.kernel == "warp_hopper" else self.warps // 4 // self.slices

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread of a second consumer warpgroup: as many as the first has, and no more than a GPU allows."""
        warps = self.warps + PRODUCER_WARPS
        return min(256, (self.registers * warps - PRODUCER_REGISTERS * PRODUCER_WARPS) // self.warps // 8 * 8)


TileSizes = tuple[int, int, int, int, int, int, int]  # as the tables below name them
# By values of a word, rows of x and a weight's shape: block_n, block_k (0: slices'), splits, warps, stages, slices, registers.
MEASURED: dict[int, dict[int, dict[str, TileSizes]]] = {
    2: {
        1: {"square": (16, 0, 1, 4, 5, 4, 64), "mid N": (16, 0, 1, 4, 5, 4, 64), "large N": (128, 0, 1, 4, 5, 1, 128),
            "large K": (16, 0, 1, 4, 8, 4, 80)},
        8: {"square": (16, 0, 1, 4, 4, 4, 64), "mid N": (32, 0, 1, 8, 4, 4, 80), "large N": (128, 0, 1, 4, 5, 1, 80),
            "large K": (32, 0, 1, 8, 8, 4, 80)},
        16: {"square": (64, 256, 2, 8, 4, 2, 80), "mid N": (64, 256, 2, 8, 4, 2, 80), "large N": (128, 128, 1, 8, 4, 1, 80),
             "large K": (64, 256, 2, 8, 6, 2, 128)},
        32: {"square": (64, 256, 2, 4, 4, 1, 80), "mid N": (64, 256, 1, 8, 5, 2, 128), "large N": (128, 128, 1, 8, 4, 1, 80),
             "large K": (64, 256, 2, 8, 6, 2, 128)},
        64: {"square": (64, 128, 2, 8, 6, 2, 128), "mid N": (64, 128, 1, 8, 6, 2, 128), "large N": (128, 128, 1, 8, 3, 1, 80),
             "large K": (64, 128, 2, 8, 6, 2, 128)},
    },
    4: {
        1: {"square": (32, 0, 2, 4, 4, 2, 80), "mid N": (16, 0, 1, 4, 2, 4, 64), "large N": (64, 0, 1, 4, 3, 1, 64),
            "large K": (32, 0, 3, 4, 3, 2, 80)},
        8: {"square": (32, 0, 2, 4, 3, 2, 80), "mid N": (16, 0, 1, 4, 2, 4, 64), "large N": (128, 0, 1, 8, 3, 1, 80),
            "large K": (64, 0, 4, 8, 3, 2, 80)},
        16: {"square": (64, 256, 2, 8, 4, 2, 80), "mid N": (64, 256, 2, 8, 4, 2, 80), "large N": (128, 256, 1, 8, 3, 1, 80),
             "large K": (64, 256, 4, 8, 4, 2, 80)},
        32: {"square": (64, 256, 2, 8, 4, 2, 128), "mid N": (64, 256, 1, 8, 6, 2, 128), "large N": (128, 256, 1, 4, 2, 1, 128),
             "large K": (64, 256, 2, 8, 6, 2, 128)},
        64: {"square": (64, 128, 2, 8, 6, 2, 128), "mid N": (64, 128, 1, 8, 6, 2, 128), "large N": (256, 128, 1, 8, 5, 1, 168),
             "large K": (64, 128, 2, 8, 6, 2, 128)},
    },
}  # fmt: skip
# Of 8 bits with scales of groups, one row of x and a weight of at most SMALL_N rows: 2,048 x 4,096 takes 5.1 us with a norm,
# and with the tiles above 6.3.
SMALL_N, SMALL_N_GROUPED_1 = 2048, (32, 0, 2, 4, 4, 2, 80)
LARGE_N_GROUPED_64 = (256, 128, 1, 8, 4, 1, 168)  # of 8 bits: with scales of groups, the tiles above would spill
# Tiles for more than FEW rows, by rows of x and of the weight, as above.
SIZES: dict[tuple[int, int], TileSizes] = {
    (64, 256): (256, 128, 1, 8, 4, 1, 168),
    (96, 64): (64, 128, 1, 4, 4, 1, 128), (96, 128): (128, 128, 1, 8, 4, 1, 168), (96, 256): (256, 128, 1, 8, 3, 1, 168),
    (128, 64): (64, 128, 1, 4, 4, 1, 128), (128, 128): (128, 128, 1, 8, 4, 1, 168), (128, 256): (256, 128, 1, 8, 3, 1, 168),
    (192, 64): (64, 128, 1, 4, 3, 1, 144), (192, 128): (128, 128, 1, 8, 3, 1, 168),
}  # fmt: skip
# By values of a word and whether groups have scales: microseconds that a wave of programs, one an SM, takes for PASS columns of
# the weight.  Where groups have scales, a thread holds two sums, and has registers for 256 rows of the weight only with 64 rows
# of x; where rows have scales, tiles of 64 rows of x gained nothing.
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
    M: int, N: int, K: int, kind: Kind, group_size: int, zero_points: bool, gated: bool, partials: bool = False
) -> QuantisedTiles | None:
    """Tiles of hopper_launch.py's kernels for M rows and a weight of N rows (gate's and up's) and K columns; None: another one.

    group_size: columns of a scale, 0: all.  zero_points: whether there are any.  partials: whether a norm adds up splits.
     Products of at most FEW rows and other shapes than the measured ones take the tiles of the most similar one.
    """
    pack_factor = pack_factor_of(kind)
    if (
        not 0 < M <= (MAX_M_GROUPED if group_size else MAX_M)
        or (kind, group_size, zero_points) not in SEEN
        or N % (16 if gated else 8)
        or K % (64 * pack_factor)
    ):
        return None
    if M > FEW:
        return by_waves(M, N, K, pack_factor, group_size > 0, partials)
    block_m, shape = tile_rows(M), shape_of(N, K)
    choice = MEASURED[pack_factor][block_m][shape]
    if group_size and pack_factor == 2 and block_m == 64 and shape == "large N":
        choice = LARGE_N_GROUPED_64
    if group_size and pack_factor == 2 and block_m == 1 and N <= SMALL_N and not gated:
        choice = SMALL_N_GROUPED_1
    return fitted(M, N, K, choice, pack_factor, 16 // pack_factor)


def by_waves(M: int, N: int, K: int, pack_factor: int, grouped: bool, partials: bool) -> QuantisedTiles:
    """The tiles with the shortest waves: each starts when all programs of the one before have ended."""
    waves = WAVES[pack_factor, grouped]

    def us(size: tuple[int, int], splits: int) -> float:
        tiles_m, tiles = _parts(M, size[0]), _parts(M, size[0]) * _parts(N, size[1])
        sums = tiles_m * size[0] * N * splits / 1e6 if splits > 1 else 0
        return (
            _parts(tiles * splits, SMS) * waves[size] * K / PASS / splits + (US_OF_PARTIALS if partials else US_OF_SUMS) * sums
        )

    def may(size: tuple[int, int], splits: int) -> bool:
        if splits == 1:
            return True
        halves = 2 * _parts(M, size[0]) * _parts(N, size[1])  # of tiles: two warpgroups count apart
        is_counted = partials or size[0] in (64, 128)  # hopper_launch.py counts no arrivals at a tile of two pieces
        return is_counted and halves <= MAX_TILES and K >= 2 * splits * SIZES[size][1]

    size, splits = min((each for each in product(waves, (1, 2, 3, 4)) if may(*each)), key=lambda each: us(*each))
    block_n, block_k, _, warps, stages, slices, registers = SIZES[size]
    return QuantisedTiles("warpgroup_hopper", size[0], block_n, block_k, splits, warps, stages, slices, registers)


def tile_rows(M: int) -> int:
    """Rows of a tile of x that holds M rows."""
    return 1 if M == 1 else max(8, 1 << (M - 1).bit_length())


def shape_of(N: int, K: int) -> str:
    """The measured shape of weight that this one is most like."""
    return "large N" if N >= LARGE_N else "large K" if K > LARGE_K else "square" if N <= 4096 else "mid N"


def fitted(M: int, N: int, K: int, choice: TileSizes, pack_factor: int, bits: int) -> QuantisedTiles:
    """Measured sizes as tiles for this weight, with no more stages than fit.  bits: of a value of the weight."""
    block_m = tile_rows(M)
    block_n, block_k, splits, warps, stages, slices, registers = choice
    alone = block_m <= MAX_WARP_M
    block_k = 64 * slices * pack_factor if alone else block_k
    if not alone and K <= block_k:  # too few steps to take turns; a warpgroup holds sums of at most 128 rows
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
def stream_tiles(M: int, N: int, K: int, kind: Kind) -> QuantisedTiles | None:
    """Tiles of stream_triton's kernel for M rows and a weight [N, K]; None: the weight is dequantised, and cuBLAS is used."""
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
    if N >= LARGE_N:
        return _stream(block_m, 128, 256, 1, 8, 3)
    if K > LARGE_K:
        return _stream(block_m, 64, 256, 4, 2, 5)
    return _stream(block_m, 32, 256, 4, 2, 5) if N <= 4096 else _stream(block_m, 64, 256, 1, 4, 5)


def _of_4_bits(block_m: int, N: int, K: int) -> QuantisedTiles:
    if N < LARGE_N and K > LARGE_K:
        return _stream(block_m, 32, 256, 4, 2, 3)
    return _stream(block_m, 32, 256, 2 if N <= 4096 else 1, 2, 6)


def _of_more_rows(block_m: int, N: int, K: int, kind: Kind) -> QuantisedTiles:
    """17 to 64 rows.  Splits give every SM a program or two."""
    if N >= LARGE_N and pack_factor_of(kind) == 2 and block_m <= 32:
        return _stream(block_m, 128, 256, 1, 8, 3)
    return _stream(block_m, 64, 128, min(4, max(1, 2 * SMS // -(-N // 64))), 4, 4)
