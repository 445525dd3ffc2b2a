"""Random weights of 8 and 4 bits, the product with one in float64, and what tiles may take of an SM."""

import torch
from torch import Tensor

from specdec.ops.products.formats.quantised import Kind, QuantisedMatrix, dequantise, pack, pack_factor_of
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS
from specdec.ops.products.tiles.dense import two_pieces
from specdec.ops.products.tiles.quantised import QuantisedTiles
from toolkit.kernels import DEVICE

# kind, columns of a scale, whether there are zero points
FORMATS: tuple[tuple[Kind, int, bool], ...] = (
    ("e4m3", 0, False), ("e4m3", 128, False), ("int8", 0, False), ("int8", 32, True), ("int4", 128, False),
    ("int4", 32, True), ("int4", 0, False), ("e2m1", 32, False), ("e2m1", 16, False),
)  # fmt: skip


def random_weight(kind: Kind, group: int, zero_points: bool, N: int, K: int) -> QuantisedMatrix:
    """Every quantised value occurs, but for NaN; scales are within a factor of two of 1 / 16."""
    generator = torch.Generator().manual_seed(N + K)
    qvalues = torch.randint(0, 16 if pack_factor_of(kind) == 4 else 256, (N, K), dtype=torch.uint8, generator=generator)
    if kind == "e4m3":
        qvalues[(qvalues & 127) == 127] = 126
    groups = -(-K // (group or K))
    scales = (1 + torch.rand(N, groups, generator=generator)) / (2000 if kind in ("e4m3", "int8") else 32)
    below = torch.randint(-8, 8, (N, groups), dtype=torch.int8, generator=generator) if zero_points else None
    return QuantisedMatrix(
        kind, pack(kind, qvalues).to(DEVICE), scales.to(DEVICE), None if below is None else below.to(DEVICE), K, group
    )


def exact(x: Tensor, weight: QuantisedMatrix, gated: bool, bias: Tensor | None = None) -> Tensor:
    want = x.double() @ dequantise(weight, torch.float64).T + (0 if bias is None else bias.double())
    if not gated:
        return want
    gate, up = want.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check_tiles(tiles: QuantisedTiles, M: int, N: int, K: int, bits: int, width: int, partials: bool = False) -> None:
    """Fails if tiles for M rows and a weight [N, K] do not fit a Hopper GPU.

    bits: of a number of the weight.  width: columns of a slice.  partials: whether a norm adds up what splits compute.
    """
    more = two_pieces(tiles.block_m)[1]
    assert not more or (more & (more - 1) == 0 and tiles.slices == 1 and (partials or tiles.splits == 1))
    stage = tiles.block_n * tiles.block_k * bits // 8 + (M > 1) * tiles.block_m * tiles.block_k * 2
    sums = 4 * tiles.block_n * tiles.block_m if tiles.slices > 1 else 0
    row = 2 * -(-K // tiles.splits) + 2 * tiles.block_k + 512 * tiles.warps if M == 1 else 0
    assert tiles.stages * stage + sums + row + 1024 <= 232_448 and tiles.stages > 1
    assert tiles.kernel == "warp_hopper" or tiles.block_n // tiles.of_program in (64, 128)
    assert 24 <= tiles.consumer_registers <= 256 and 32 * (tiles.warps + 4) * tiles.registers <= 65536
    counted = -(-N // tiles.block_n) * -(-M // tiles.block_m) * tiles.of_program
    assert tiles.splits == 1 or (counted <= ARRIVALS and tiles.splits <= -(-K // tiles.block_k))
    assert tiles.kernel == "warpgroup_hopper" or tiles.block_k == tiles.slices * width
    assert tiles.kernel == "warp_hopper" or -(-K // tiles.block_k) // tiles.splits >= tiles.slices
