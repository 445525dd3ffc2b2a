"""The table in the room's opening file says which kernel serves which rows: it is held against files and choices."""

from __future__ import annotations

import re
from itertools import product
from typing import NamedTuple, get_args

import pytest
import torch
from toolkit.paths import ROOT

import specdec.ops.products
from specdec.ops.products.formats.quantised import Kind, pack_factor_of
from specdec.ops.products.gpus import H100, H200
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS
from specdec.ops.products.numerics import FAST, INVARIANT
from specdec.ops.products.tiles import dense, quantised

ROWS = (1, 2, 6, 8, 9, 16, 33, 64, 65, 128, 192, 256, 512, 513, 1024, 2048, 2049, 8192)
WEIGHTS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (1024, 512), (512, 512))


class Line(NamedTuple):
    bits: list[int]
    rows: range
    gpus: str


def table() -> dict[str, Line]:
    found = re.findall(
        r"^\| (\w+/\w+) \| ([\d, ]+) \| (\d+)-(\d*) \| (.*?) \| .+ \|$", specdec.ops.products.__doc__ or "", re.M
    )
    return {
        kernel: Line([int(each) for each in bits.split(",")], range(int(first), int(last or 10**6) + 1), gpus)
        for kernel, bits, first, last, gpus in found
    }


def test_every_kernel_has_a_line() -> None:
    """Keeps out: a kernel that the table does not know, and a line about one that is gone."""
    room = ROOT / "specdec" / "ops" / "products" / "kernels"
    # or no products
    parts = (
        "parts_hopper", "lossless_hopper", "convert_triton", "step_triton", "own_pairs_triton", "by_expert_triton",
        "choosing_triton", "choosing_hopper", "units_hopper",
    )  # fmt: skip
    files = {f"{path.parent.name}/{path.stem}" for path in room.rglob("*_*.py") if path.stem.endswith(("_triton", "_hopper"))}
    assert {name for name in files if name.split("/")[1] not in parts} == set(table())
    chosen = {f"dense/{name}" for name in get_args(dense.Kernel)} | {f"quantised/{name}" for name in get_args(quantised.Kernel)}
    assert chosen <= set(table())


def test_choices_are_in_their_lines() -> None:
    """Keeps out: a table whose rows, bits or GPUs are not those of the choices; and a range that nothing fills."""
    seen: dict[str, set[int]] = {}

    def see(kernel: str, bits: int, M: int, gpus: str) -> None:
        line = table()[kernel]
        assert bits in line.bits and M in line.rows and gpus in line.gpus, (kernel, bits, M)
        seen.setdefault(kernel, set()).add(M)

    for M, (N, K), gated in product(ROWS, WEIGHTS, (False, True)):
        for kind, partials in product((H100, H200), (False, True)):
            if tiles := FAST.product_tiles(M, N, K, torch.bfloat16, gated, kind, partials=partials):
                see(f"dense/{tiles.kernel}", 16, M, "H200" if tiles.kernel.endswith("hopper") else "9.0")
            if lossless := FAST.lossless_tiles(M, N, K, gated, kind):
                see(f"quantised/{lossless.kernel}", 12, M, "9.0")
        tiles = INVARIANT.product_tiles(M, N, K, torch.bfloat16, gated)
        see(f"dense/{tiles.kernel}", 16, M, "9.0")
        for values, group in product(("e4m3", "int4"), (0, 128)):
            for hopper in (False, True):
                quantised = FAST.quantised_tiles(M, N, K, values, group, False, gated, False, hopper)
                if quantised is not None:
                    see(f"quantised/{quantised.kernel}", 16 // pack_factor_of(values), M, "9.0")
    for kernel, rows in seen.items():
        ends = table()[kernel].rows
        assert min(rows) == ends.start and max(rows) == min(ends.stop - 1, max(ROWS)), kernel


@pytest.mark.parametrize(("kind", "group", "zero_points"), quantised.SEEN, ids=str)
def test_each_tile_of_a_split_product_has_a_counter(kind: Kind, group: int, zero_points: bool) -> None:
    """Keeps out: more tiles than counters, of which a program with two warpgroups takes two; a GPU alone would show it."""
    splits = 0
    for N, K in product((1024, 4096, 6144, 8192, 17408, 34816, 131072), (1024, 4096, 14336, 28672)):
        for M in (*range(1, 65, 7), 65, 96, 128, 190, 220, 256, 468, 500, 1000, 2048):
            if (tiles := quantised.hopper_tiles(M, N, K, kind, group, zero_points, False)) is not None and tiles.splits > 1:
                splits += 1
                assert -(-N // tiles.block_n) * -(-M // tiles.block_m) * tiles.of_program <= ARRIVALS, (M, N, K, tiles)
    assert splits > 10
