"""How long a product takes with given tiles, and whether it is right.

Products of a decode step read their weights out of memory and follow each other directly.  So a CUDA graph is timed that runs
through copies of the weight which are larger than the GPU's cache.

Shapes: M rows, K in, N out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specdec.ops.compiling.rehearsal import Rehearsals
from specdec.ops.products.dense import with_tiles
from specdec.ops.products.gpus import GpuMatch, match_of
from specdec.ops.products.tiles.dense import ProductTiles
from specdec.ops.products.tuned.table import Product

COLD_BYTES = 250_000_000  # several times the largest cache
MIN_PRODUCTS, REPLAYS, UNCOUNTED = 16, 9, 2
MAX_ERROR = 2e-2  # of a result in 16 bits, against float32


Multiply = Callable[[Tensor, Tensor, bool, ProductTiles | None], Tensor]


class ProductBench:
    """Times one product on the current GPU, with random weights.

    multiply: computes it, given x, a weight, whether it is gated, and tiles.  cold_bytes: of copies of the weight.
    """

    def __init__(
        self, product: Product, device: torch.device, multiply: Multiply = with_tiles, cold_bytes: int = COLD_BYTES
    ) -> None:
        self.product, self.device, self._multiply = product, device, multiply
        copies = math.ceil(cold_bytes / (product.N * product.K * product.dtype.itemsize))
        self._generator = torch.Generator(device)
        made = [self._random(product.N) for _ in range(copies)]
        self._weights = [weight.mul_(product.K**-0.5) for weight in made]

    @property
    def match(self) -> GpuMatch:
        """The kind of GPU whose tiles are compared with."""
        return match_of(self.device)

    def rows(self, M: int) -> Tensor:
        return self._random(M)

    def _random(self, rows: int) -> Tensor:
        dtype = self.product.dtype
        return torch.randn(rows, self.product.K, generator=self._generator, device=self.device, dtype=dtype)

    def compile(self, M: int, tiles: list[ProductTiles | None], rehearsals: Rehearsals | None) -> None:
        """Compiles for all these tiles side by side; None: Triton can't, and compiles each where it is launched."""
        if rehearsals is None:
            return
        x_MK = self.rows(M)
        waits = [rehearsals.rehearse(partial(self._run, x_MK, each)) for each in tiles]
        rehearsals.begin()
        for wait in waits:
            wait()

    def is_right(self, M: int, tiles: ProductTiles | None) -> bool:
        """Whether these tiles give the product; also False where no kernel can be made of them."""
        x_MK, weight = self.rows(M), self._weights[0]
        y_MN = x_MK.float() @ weight.float().T
        if self.product.gated:
            gate, up = y_MN.chunk(2, -1)
            y_MN = torch.nn.functional.silu(gate) * up
        try:
            got = self._multiply(x_MK, weight, self.product.gated, tiles).float()
        except Exception:  # Triton has an error of its own for each thing that a GPU lacks
            return False
        return bool((got - y_MN).norm() <= MAX_ERROR * y_MN.norm())

    def microseconds(self, M: int, tiles: ProductTiles | None) -> float:
        """The median time of a product."""
        x_MK = self.rows(M)
        todo = self._weights * math.ceil(MIN_PRODUCTS / len(self._weights))
        self._run(x_MK, tiles)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in todo:
                self._multiply(x_MK, weight, self.product.gated, tiles)
        times = []
        for _ in range(UNCOUNTED + REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / len(todo))
        return statistics.median(times[UNCOUNTED:])

    def _run(self, x_MK: Tensor, tiles: ProductTiles | None) -> Tensor:
        return self._multiply(x_MK, self._weights[0], self.product.gated, tiles)
