"""How long a product takes with given tiles, and whether it is right.

Products of a decode step read their weights out of memory and follow each other directly.  So a CUDA graph is timed that runs
through copies of the weight which are larger than the GPU's cache.

Shapes: T rows, I in, O out.
"""

from __future__ import annotations

import math
import statistics
from functools import partial

import torch
from torch import Tensor

from specdec.ops.compiling.rehearsal import Rehearsals
from specdec.ops.products.dense import with_tiles
from specdec.ops.products.tiles.dense import ProductTiles
from specdec.ops.products.tuned.table import Product

COLD_BYTES = 250_000_000  # several times the largest cache
LEAST_PRODUCTS, REPLAYS, UNCOUNTED = 16, 9, 2
MOST_ERROR = 2e-2  # of a result in 16 bits, against float32


class Bench:
    """Times one product on the current GPU, with random weights."""

    def __init__(self, product: Product, device: torch.device) -> None:
        self.product, self.device = product, device
        copies = math.ceil(COLD_BYTES / (product.O * product.I * product.dtype.itemsize))
        self._generator = torch.Generator(device)
        made = [self._random(product.O) for _ in range(copies)]
        self._weights = [weight.mul_(product.I**-0.5) for weight in made]

    def rows(self, T: int) -> Tensor:
        return self._random(T)

    def _random(self, rows: int) -> Tensor:
        dtype = self.product.dtype
        return torch.randn(rows, self.product.I, generator=self._generator, device=self.device, dtype=dtype)

    def compile(self, T: int, tiles: list[ProductTiles | None], rehearsals: Rehearsals | None) -> None:
        """Compiles for all these tiles side by side; None: Triton can't, and compiles each where it is launched."""
        if rehearsals is None:
            return
        x_TI = self.rows(T)
        waits = [rehearsals.rehearse(partial(self._run, x_TI, each)) for each in tiles]
        rehearsals.begin()
        for wait in waits:
            wait()

    def is_right(self, T: int, tiles: ProductTiles | None) -> bool:
        """Whether these tiles give the product; also False where no kernel can be made of them."""
        x_TI, weight = self.rows(T), self._weights[0]
        y_TO = x_TI.float() @ weight.float().T
        if self.product.gated:
            gate, up = y_TO.chunk(2, -1)
            y_TO = torch.nn.functional.silu(gate) * up
        try:
            got = with_tiles(x_TI, weight, self.product.gated, tiles).float()
        except Exception:  # Triton has an error of its own for each thing that a GPU lacks
            return False
        return bool((got - y_TO).norm() <= MOST_ERROR * y_TO.norm())

    def microseconds(self, T: int, tiles: ProductTiles | None) -> float:
        """The median time of a product."""
        x_TI = self.rows(T)
        todo = self._weights * math.ceil(LEAST_PRODUCTS / len(self._weights))
        self._run(x_TI, tiles)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in todo:
                with_tiles(x_TI, weight, self.product.gated, tiles)
        times = []
        for _ in range(UNCOUNTED + REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / len(todo))
        return statistics.median(times[UNCOUNTED:])

    def _run(self, x_TI: Tensor, tiles: ProductTiles | None) -> Tensor:
        return with_tiles(x_TI, self._weights[0], self.product.gated, tiles)
