"""Measures the tiles of products and keeps what is faster than the tables.

Shapes: M rows.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from specdec.ops.compiling.rehearsal import Rehearsals, compiles_ahead
from specdec.ops.cuda_graph import on_device
from specdec.ops.products.tiles.dense import ProductTiles
from specdec.ops.products.tuned.here import look_for
from specdec.ops.products.tuned.table import MeasuredProduct, Origin, Product, TunedTable, path_for
from specdec.tune.candidates import candidates
from specdec.tune.measure import ProductBench

GAIN = 0.98  # what is kept must take at most this share of the time that the GPU kind's own tiles take: less is noise
FINALISTS = 3  # that are timed again, beside the kind's own


class TunedRow(NamedTuple):
    """What was measured for a number of rows of a product.  before, after: microseconds with the kind's tiles, and the best."""

    product: Product
    M: int
    tried: int
    before: float
    after: float
    tiles: ProductTiles | None
    is_kept: bool


def tune(
    products: Sequence[Product],
    rows: Sequence[int],
    target: str,
    device: torch.device,
    show: Callable[[TunedRow, int, int], None] = lambda row, done, of: None,
    gpu: str = "",
    make_bench: Callable[[Product, torch.device], ProductBench] = ProductBench,
) -> TunedTable:
    """Measures, and writes the table after each product.  Returns the table with what it had before.

    rows: numbers of rows, up to MAX_ROWS.  target: what people call it.  show: gets each row when it is measured.
    gpu: the GPU's name, if it is known.  make_bench: what times a product there.
    """
    gpu = gpu or torch.cuda.get_device_name(device)
    table, _ = look_for(gpu)
    table = TunedTable(Origin.here(gpu)) if table is None else table
    rehearsals, done = Rehearsals(device) if compiles_ahead() else None, 0
    try:
        with on_device(device), torch.inference_mode():
            for product in products:
                bench, tiles = make_bench(product, device), dict[int, ProductTiles | None]()
                for M in sorted(set(rows)):
                    row = measure_rows(bench, M, rehearsals)
                    tiles[M], done = row.tiles, done + 1
                    show(row, done, len(products) * len(set(rows)))
                table.products[product] = MeasuredProduct(tiles, datetime.date.today().isoformat(), target)
                table.save(path_for(gpu))
    finally:
        if rehearsals is not None:
            rehearsals.close()
    return table


def measure_rows(bench: ProductBench, M: int, rehearsals: Rehearsals | None) -> TunedRow:
    """The best tiles for M rows: all candidates once, then the best of them again, in turns with the kind's own."""
    own, *others = candidates(M, bench.product, bench.match)
    bench.compile(M, [own, *others], rehearsals)
    right = [tiles for tiles in others if bench.is_right(M, tiles)]
    finalists = sorted(right, key=lambda tiles: bench.microseconds(M, tiles))[:FINALISTS]
    times = {tiles: [bench.microseconds(M, tiles)] for tiles in (own, *finalists)}
    for _ in range(2):
        for tiles, found in times.items():
            found.append(bench.microseconds(M, tiles))
    best = min(times, key=lambda tiles: min(times[tiles]))
    before, after = min(times[own]), min(times[best])
    is_kept = after <= GAIN * before
    return TunedRow(bench.product, M, 1 + len(others), before, after, best if is_kept else own, is_kept)
