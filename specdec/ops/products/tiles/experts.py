"""The tiles of products with experts' weights, chosen by shapes alone.  Knows no tensor and no model.

Those of weights in 8 or 4 bits were measured on an H200: benchmarks/products/README.md, "Experts in 8 and 4 bits".

Shapes: P pairs of a token and an expert, E experts.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from specdec.ops.products.formats.quantised import Kind

ExpertsKind = Kind | Literal["dense"]
ExpertsKernel = Literal["mixture_triton", "few_tokens_triton", "few_hopper"]
# Up to so many tokens router_triton.py chooses experts, and router_many_triton.py for more.
MOST_ROUTED = 256
# Up to so many tokens few_tokens_triton.py multiplies with experts of these kinds; beyond them, and with other kinds, others
# are faster.  Measured on an H200 by benchmarks products.few_tokens.
# Of gpt-oss-20b's size in e2m1, 6 tokens, a layer takes 64 us with 8 experts in use, 99 with 17, by mixture_triton.py 72 with
# 7 and 101 with 16, by few_hopper.py 58 with 7 and 107 with 17.
MOST_TOKENS: dict[ExpertsKind, int] = {"dense": 64, "e4m3": 8, "int4": 8, "e2m1": 6}
# Threshold in tokens: above it dense experts without gates run sorted, where their second product is faster.  On an H200, ms of
# Nemotron-3-Nano's layers: 8 tokens 4.6 (sorted 4.9), 32 tokens 11.5 (sorted 9.7).
MAX_UNGATED = 16
# Up to so many tokens few_hopper.py multiplies with experts of these kinds on Hopper GPUs, if a token has at most
# MOST_HOPPER_CHOSEN experts, which the warps of the second product share evenly.
MOST_HOPPER: dict[ExpertsKind, int] = {"e4m3": 1, "e2m1": 1, "int4": 8}
MOST_HOPPER_CHOSEN = 8
SMS = 132  # of an H200
FEW = 64  # threshold in pairs: fewer have too few tiles for all SMs
MAX_READ = 512  # threshold in pairs: programs find their pairs in more by sorting them first
MAX_SORTED = 8192  # threshold in pairs: up to so many one launch of by_expert_triton.py sorts, and more two launches
MOST_STACKED = 64  # pairs an expert, on average: up to so many stacked_triton.py is faster with dense experts than torch


class RouterTiles(NamedTuple):
    """What one program of router_triton.py works on: tokens, rows and columns of the weight.  warps: Triton's.

    block_k: columns of 16 bits; half as many of 32.  A warp chooses a token's experts: more tokens than warps take turns.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int


class ManyRouterTiles(NamedTuple):
    """What one program of router_many_triton.py works on: tokens, and columns of a step.  block_k, warps: as above.

    stages: of the pipeline.
    """

    block_m: int
    block_k: int
    warps: int
    stages: int


class ExpertTiles(NamedTuple):
    """What one program works on.

    block_m: pairs (padded), or in few_tokens_triton.py all tokens.  block_n: rows of a matrix.  warps, stages: Triton's.
    unroll: steps of 128 columns between two looks at the pipeline; in few_hopper.py units (units_hopper.py) whose words are
        loaded at one time.  splits: programs that share a tile of rows of the second product in few_tokens_triton.py; of a
        single token about so many, equally many for each of its experts, of three steps or more.
    slices: of a row's columns, which a program's warps share instead of the rows; more than one are as many as warps.
    prefetch: bytes of each row that few_tokens_triton.py asks for before its wait: of shared experts in the first product, and
        of a single token's in the second one, where they compete with what the first one still reads.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    unroll: int = 1
    splits: int = 1
    slices: int = 1
    prefetch: int = 512


class MixtureTiles(NamedTuple):
    """Which kernel computes a mixture, and what its programs work on in the two products of an MLP.

    chooses: whether few_hopper.py chooses a single token's experts itself.  On an H200 Qwen3-30B-A3B's plain step takes 1.92 ms
        so in fp8, 2.03 otherwise, and 1.58 in int4, 1.66 otherwise; a layer of gpt-oss's in e2m1 takes as long.
    """

    kernel: ExpertsKernel
    gate_up: ExpertTiles
    down: ExpertTiles
    chooses: bool = False


def mixture_tiles(
    tokens: int, top_k: int, experts: int, kind: ExpertsKind, hopper: bool = False, gated: bool = True
) -> MixtureTiles | None:
    """None: others multiply.  hopper: whether the kernels for Hopper GPUs can run.  gated: whether experts have gates."""
    if kind == "dense" and not gated and tokens > MAX_UNGATED:
        return None
    if hopper and tokens <= MOST_HOPPER.get(kind, 0) and top_k <= MOST_HOPPER_CHOSEN:
        return few_hopper_tiles(tokens, kind)
    if tokens <= MOST_TOKENS.get(kind, 0):
        return few_tokens_tiles(tokens, kind, experts)
    both = expert_tiles(tokens * top_k, experts)
    return None if kind == "dense" else MixtureTiles("mixture_triton", both, both)


def few_tokens_tiles(tokens: int, kind: ExpertsKind, experts: int = 128) -> MixtureTiles:
    """The fastest of those that benchmarks/products/few_tokens.py tries, on an H200."""
    block_m = max(8, 1 << (tokens - 1).bit_length())
    if kind == "e2m1":
        down = ExpertTiles(block_m, 32, 4, 3, 1, 4, 4) if tokens == 1 else ExpertTiles(block_m, 64, 4, 3, 1, 8, 4)
        return _few(ExpertTiles(block_m, 64, 4, 4, 2), down)
    if kind == "e4m3" and tokens == 1:
        return _few(ExpertTiles(block_m, 32, 4, 4, slices=4), ExpertTiles(block_m, 16, 2, 4, splits=8, slices=2))
    if kind != "dense" and tokens == 1:
        return _few(ExpertTiles(block_m, 32, 2, 4, 2), ExpertTiles(block_m, 32, 1, 4, 2, 8))
    if kind != "dense":
        first = ExpertTiles(block_m, 64, 4, 4, 2) if kind == "int4" else ExpertTiles(block_m, 32, 2, 4, 2)
        return _few(first, ExpertTiles(block_m, 16, 1, 4, 2, 8))
    if block_m > 32:
        return _few(ExpertTiles(block_m, 64, 4, 3), ExpertTiles(block_m, 64, 4, 3, splits=8))
    if block_m > 8:
        return _few(ExpertTiles(block_m, 64, 4, 3), ExpertTiles(block_m, 128, 4, 3, splits=8))
    if tokens == 1:
        stages = 6 if experts <= 64 else 4  # measured: of 64 experts of 1536 a layer takes 36.2 us instead of 37.9
        return _few(ExpertTiles(block_m, 32, 2, stages), ExpertTiles(block_m, 32, 2, 4, splits=16, prefetch=0))
    return _few(ExpertTiles(block_m, 16, 1, 5), ExpertTiles(block_m, 16, 1, 4, splits=8))


def few_hopper_tiles(tokens: int, kind: ExpertsKind) -> MixtureTiles:
    """Those of few_hopper.py.  Its warps are slices."""
    if tokens > 1:
        tiles = ExpertTiles(8, 16, 4, 1, 4, slices=4), ExpertTiles(8, 16, 8, 1, 2, splits=2, slices=8)
    elif kind == "e4m3":
        tiles = ExpertTiles(8, 16, 4, 1, 4, slices=4), ExpertTiles(8, 16, 8, 1, 6, splits=2, slices=8)
    elif kind == "e2m1":
        tiles = ExpertTiles(8, 16, 4, 1, 6, slices=4), ExpertTiles(8, 16, 4, 1, 6, splits=4, slices=4)
    else:
        tiles = ExpertTiles(8, 32, 4, 1, 4, slices=4), ExpertTiles(8, 16, 8, 1, 6, slices=8)
    return MixtureTiles("few_hopper", *tiles, chooses=tokens == 1 and kind != "e2m1")


def _few(gate_up: ExpertTiles, down: ExpertTiles) -> MixtureTiles:
    return MixtureTiles("few_tokens_triton", gate_up, down)


def router_tiles(tokens: int, experts: int) -> RouterTiles | ManyRouterTiles:
    if tokens > MOST_ROUTED:
        return many_router_tiles(tokens, experts)
    if tokens > 64:
        return RouterTiles(8, 16, 512, 8)
    return RouterTiles(4, 16, 1024 if experts > 64 else 512, 4)


def many_router_tiles(tokens: int, experts: int) -> ManyRouterTiles:
    """As many programs as SMs, if there are so many blocks of at least 16 tokens."""
    block_m = next((size for size in (16, 32) if tokens <= size * SMS), 64)
    if experts > 128:  # whose scores take many registers
        block_m = 16 if experts > 256 else min(32, block_m)
    return ManyRouterTiles(block_m, 64, 8, 4 if experts <= 128 else 3 if experts <= 256 else 2)


@cache
def expert_tiles(pairs: int, experts: int) -> ExpertTiles:
    """By how many pairs there are, and how many an expert has on average."""
    each = -(-pairs // experts)
    block_m = min(64, max(8, 1 << (each // 2).bit_length()))
    if block_m > 16:
        return ExpertTiles(block_m, 64, 4, 3)
    if block_m > 8:
        return ExpertTiles(block_m, 128, 4, 3)
    return ExpertTiles(8, 128, 4, 3, unroll=2) if pairs > FEW else ExpertTiles(8, 32, 2, 3, unroll=2)


class StackedTiles(NamedTuple):
    """What one program of stacked_triton.py's kernels works on.  block_k: columns of a step; the other names as above."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


# Heads' projections of at most MOST_EACH tokens are chained, unlike a library's: measured, benchmarks/latent/README.md.
MOST_EACH = 32


def each_tiles(tokens: int) -> StackedTiles | None:
    """Those of heads' projections on Hopper GPUs and later; None: a library multiplies."""
    if tokens > MOST_EACH:
        return None
    return StackedTiles(max(16, 1 << (tokens - 1).bit_length()), 64, 64, 4, 4)


def sorted_tiles(tokens: int, top_k: int, experts: int) -> StackedTiles | None:
    """None: a library multiplies with dense experts, in rows that are sorted too."""
    rows = -(-tokens * top_k // experts)
    if rows > MOST_STACKED:
        return None
    if rows > 32:
        return StackedTiles(64, 128, 64, 4, 4)
    return StackedTiles(32, 64, 128, 4, 4) if rows > 16 else StackedTiles(16, 128, 128, 4, 3)


def stacked_tiles(rows: int, itemsize: int) -> StackedTiles:
    """Tiles for a stack of matrices with about `rows` rows of x each.

    In 16 bits the order of sums is that of `invariant_tiles`.  Numbers of 4 bytes, of float32 routers, are multiplied without
    tensor cores: a thread adds up an element's columns from the first to the last, whatever the tile.
    """
    if itemsize == 4:
        return StackedTiles(16, 32, 128, 4, 3)
    if rows <= 32:
        return StackedTiles(16 if rows <= 16 else 32, 64, 128, 4, 4)
    return StackedTiles(64, 128, 64, 4, 4) if rows <= 64 else StackedTiles(128, 128, 64, 8, 4)


class GroupedTiles(NamedTuple):
    """What a tile of grouped_hopper.py's kernel is, beside GROUPED_TILE rows of x.  block_n: rows of a matrix.

    group_m: tiles of x whose programs are neighbours, so that they read the same tiles of the weight from L2.
    """

    block_n: int
    block_k: int
    stages: int
    group_m: int


# Rows of an expert begin at a multiple of this in grouped_hopper.py, which multiplies tiles of so many.
GROUPED_ALIGN, GROUPED_TILE = 64, 128


def grouped_tiles(H: int, F: int) -> tuple[GroupedTiles, GroupedTiles] | None:
    """Of gate and up, and of down; None where TMA can't read rows.  Stages: as many as fit beside a tile of the result."""
    return None if H % 8 or F % 8 else (GroupedTiles(256, 64, 4, 8), GroupedTiles(256, 64, 3, 8))
