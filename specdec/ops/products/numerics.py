"""The policy that is asked wherever a choice depends on how much is computed at once: tiles, splits, own or library product.

A sum of floating-point numbers depends on its order, and tiles and splits decide the order.  `FAST` chooses what was measured
to be fastest for each shape, so a row's result may differ in its last bits with the number of rows beside it.  `INVARIANT`
chooses so that the order of every sum is the same for any number of rows: a token's logits then depend on the tokens up to it
alone, bit for bit.

This module knows the choices, and neither kernels nor models.  Choices of attention belong to its backends: make_backend
(attention/attend.py) is told the policy too.

Shapes: M rows, K in, N out.
"""

from __future__ import annotations

from typing import Never

import torch

from specdec.ops.products.formats.quantised import Kind
from specdec.ops.products.gpus import H100, GpuKind
from specdec.ops.products.tiles.dense import ProductTiles, invariant_tiles, product_tiles
from specdec.ops.products.tiles.experts import (
    ExpertsKind,
    GroupedTiles,
    ManyRouterTiles,
    MixtureTiles,
    RouterTiles,
    StackedTiles,
    grouped_tiles,
    mixture_tiles,
    router_tiles,
    sorted_tiles,
    stacked_tiles,
)
from specdec.ops.products.tiles.lossless import lossless_tiles
from specdec.ops.products.tiles.quantised import QuantisedTiles, hopper_tiles, stream_tiles
from specdec.ops.products.tuned.table import Product, TunedTable

FEW_TOKENS = 64  # up to this many tokens, several programs share a token's heads: the GPU has room for all of them at once


class Numerics:
    """The policy that chooses what is fastest.

    is_invariant: whether a row's result must not depend on what is computed beside it.  It then can't be left to a library,
        and rows can't read a common prefix together.
    """

    is_invariant = False

    def product_tiles(
        self, M: int, N: int, K: int, dtype: torch.dtype, gated: bool, kind: GpuKind = H100, tuned: TunedTable | None = None,
        partials: bool = False,
    ) -> ProductTiles | None:  # fmt: skip
        """The tiles of a product of M rows with a weight [N, K]; None: cuBLAS computes it.

        gated: whether the weight holds gate and up rows.
        kind: the kind of GPU whose tiles are taken.
        tuned: what was measured on this machine, which counts before the kind's.
        partials: whether a norm adds up split-K partials.
        """
        if tuned is not None:
            is_known, tiles = tuned.find(M, Product(N, K, gated, dtype))
            if is_known:
                return tiles
        return product_tiles(M, N, K, dtype, gated, kind, partials)

    def quantised_tiles(
        self, M: int, N: int, K: int, values: Kind, group_size: int, zero_points: bool, gated: bool, partials: bool,
        hopper: bool,
    ) -> QuantisedTiles | None:  # fmt: skip
        """Those of a quantised weight [N, K], of the kind `values`; None: it is dequantised, and cuBLAS computes the product.

        group_size, zero_points: as of hopper_tiles.  hopper: whether the kernels for Hopper GPUs can run.
        """
        tiles = hopper_tiles(M, N, K, values, group_size, zero_points, gated, partials) if hopper else None
        return tiles or stream_tiles(M, N, K, values)

    def lossless_tiles(self, M: int, N: int, K: int, gated: bool, kind: GpuKind) -> QuantisedTiles | None:
        """Those of a weight that is kept in 12 bits too; None: the product reads the dense weight."""
        return lossless_tiles(M, N, K, gated, kind)

    def mixture_tiles(
        self, tokens: int, top_k: int, experts: int, kind: ExpertsKind, dtype: torch.dtype, chained: bool,
        hopper: bool = False, gated: bool = True,
    ) -> MixtureTiles | None:  # fmt: skip
        """Those of a mixture of experts of that kind, and x of that dtype; None: torch's products compute it.

        chained: whether launches can be.  hopper: whether the kernels for Hopper GPUs can run.  gated: whether experts have
        gates.
        """
        if dtype == torch.float32 or not chained:
            return None
        return mixture_tiles(tokens, top_k, experts, kind, hopper, gated)

    def sorted_tiles(
        self, tokens: int, top_k: int, experts: int, dtype: torch.dtype, chained: bool
    ) -> StackedTiles | None:  # fmt: skip
        """Those of our own products with dense experts, of pairs sorted by expert; None: torch multiplies.

        It is asked where `mixture_tiles` has none.
        """
        return sorted_tiles(tokens, top_k, experts) if chained and dtype != torch.float32 else None

    def grouped_tiles(self, H: int, F: int, dtype: torch.dtype) -> tuple[GroupedTiles, GroupedTiles] | None:
        """Those of gate and up, and of down, of dense experts with many rows each on Hopper GPUs; None: torch multiplies.

        It is asked where `sorted_tiles` has none.
        """
        return grouped_tiles(H, F) if dtype != torch.float32 else None

    def router_tiles(self, tokens: int, experts: int, dtype: torch.dtype) -> RouterTiles | ManyRouterTiles | None:
        """Those of a router of x of that dtype; None: a library computes its logits, and torch's operations choose."""
        return None if dtype == torch.float32 else router_tiles(tokens, experts)

    def heads_a_program(self, tokens: int, heads: int) -> int:
        """How many of a token's heads one program norms, rotates and stores before attention: a power of two."""
        most = 1 << (heads - 1).bit_length()
        return most if tokens > FEW_TOKENS else min(8, most)


class Invariant(Numerics):
    """The policy by which a row's result depends on nothing but the row: in bfloat16 and float16, on Hopper."""

    is_invariant = True

    def product_tiles(
        self, M: int, N: int, K: int, dtype: torch.dtype, gated: bool, *others: object, **more: object
    ) -> ProductTiles:
        assert dtype in (torch.bfloat16, torch.float16), dtype
        return invariant_tiles(M, N, K, gated)

    def quantised_tiles(self, *shape: object, **more: object) -> Never:
        raise AssertionError("refused where the decoder is built")

    def lossless_tiles(self, *shape: object, **more: object) -> None:
        return None  # its kernels add up in the order of their own tiles

    def mixture_tiles(
        self, tokens: int, top_k: int, experts: int, kind: ExpertsKind, *others: object
    ) -> None:  # fmt: skip
        assert kind == "dense", "refused where the decoder is built"
        return None  # `sorted_tiles` has those: few_tokens_triton.py adds experts up in another order for one token

    def sorted_tiles(self, tokens: int, top_k: int, experts: int, dtype: torch.dtype, *others: object) -> StackedTiles:
        return stacked_tiles(-(-tokens * top_k // experts), dtype.itemsize)

    def grouped_tiles(self, *shape: object) -> Never:
        raise AssertionError("`sorted_tiles` has those")

    def router_tiles(self, tokens: int, experts: int, dtype: torch.dtype) -> None:
        return None  # `stacked_tiles` has those of logits, whatever the number of tokens

    def stacked_tiles(self, rows: int, dtype: torch.dtype) -> StackedTiles:
        """Those of a stack of matrices with about `rows` rows of x each; under `FAST` torch multiplies with a stack."""
        return stacked_tiles(rows, dtype.itemsize)

    def heads_a_program(self, tokens: int, heads: int) -> int:
        return super().heads_a_program(1, heads)


FAST, INVARIANT = Numerics(), Invariant()
