"""The cells of the matrix test: every combination of a backend, a cache, pages, trees and what else models have.

Shapes of the names: N tokens, H heads, K kv heads, D head dim, E value dim, C latent rank, R rotated dim.
"""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from specdec.attention.caches.fp8_latent import FP8_LATENTS
from specdec.attention.caches.int8_keys import INT8_KEYS
from specdec.attention.capabilities import BACKENDS, TABLE, problem_of
from specdec.attention.capability import GRAPHS, KINDS, KV_DTYPES, Feature
from specdec.attention.kinds import FULL, LayerKind
from specdec.attention.needs import AttentionNeeds

HAS_GPU = torch.cuda.is_available()
H100 = torch.device("cuda", 0)
DEVICE = "cuda" if HAS_GPU else "cpu"
LAYERS = {"full": FULL, "window": LayerKind(window=5), "chunk": LayerKind(chunk=4)}
SHARED = list(LAYERS).index("window")  # the layer whose keys and values another layer shares
QUERIES = " queries"  # what follows a kv_cache_dtype whose queries are rounded to int8
PAIRS = {"differential": "auto", "differential fp8": "fp8", "differential int8": "int8"}  # caches, and how they are kept
CACHES = (*KV_DTYPES, "int8" + QUERIES, INT8_KEYS + QUERIES, "mla", "sparse", "sparse fp8", "split", *PAIRS)
RANKS = {"mla": 16, FP8_LATENTS: 128, "sparse": 16, "sparse fp8": 128}  # C, of caches of latents, where a backend takes any
SPARSE = ("sparse", "sparse fp8")  # caches of latents that are read as an indexer selected
PAGE_SIZES = (1, 4, 256)
LENS = (13, 0)  # one ends inside a chunk; one has nothing committed yet
N, H, K, E = 4, 4, 2, 8
D = 16
ROPE_DIM = 10  # of latents: with it, no row of latents is a multiple of 16 bytes, by which kernels like to read
DIFFERENCE = (0.6, 0.7, 1e-5)  # a factor, a scale and an eps
PARENTS = (0, 0, 0, 1)  # a tree of depths 0 1 1 2
SOFTCAP, SINKS = 3.0, (0.5, -1.0, 0.0, 2.0)
# What a cell has besides.  cross: a layer that reads an encoder's texts; encoder: texts that are read in both directions.
EXTRAS = ("", "alibi", "cross", "encoder")
SLOPES = (0.5, 0.25, -0.125, 1.0)
TEXTS, LONGEST, REACH = (7, 0), 9, 1  # the texts' lengths, the room for each, and the window of one layer of the encoder
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest, and of each element
FLOAT8_PRODUCTS = 0.12  # the tolerance where a GPU rounds softmax weights to float8: by up to 1/16 of each


class MatrixCell(NamedTuple):
    """cache: a kv_cache_dtype, perhaps with QUERIES; mla; one of SPARSE; split: values of another width; or one of PAIRS.

    capped: with softcap and sinks.  extra: one of EXTRAS.
    """

    backend: str
    kind: str
    cache: str
    page_size: int
    tree: bool
    capped: bool
    graphs: Any
    extra: str = ""

    @property
    def rank(self) -> int | None:
        """C; None: the cache keeps no latents."""
        dims = TABLE[self.backend].latents
        return dims[0] if dims and self.cache in RANKS else RANKS.get(self.cache)

    @property
    def rope_dim(self) -> int:
        """R, of latents."""
        dims = TABLE[self.backend].latents
        return dims[1] if dims else ROPE_DIM

    @property
    def head_dim(self) -> int:
        """D.  On a GPU a head of flash-attn 2 is as wide as any build of it knows: builds leave the small ones out."""
        return 64 if HAS_GPU and self.backend == "fa2" else D

    @property
    def float8_queries(self) -> bool:
        """Whether the library rounds queries and softmax weights to float8."""
        return self.backend == "fa3" and self.cache == "fp8"

    @property
    def tolerance(self) -> float:
        return FLOAT8_PRODUCTS if self.float8_queries and HAS_GPU else TOLERANCE[dtype_of(self.backend)]

    @property
    def kv_cache_dtype(self) -> str:
        kept = PAIRS.get(self.cache, self.cache.removesuffix(QUERIES))
        return FP8_LATENTS if kept == "sparse fp8" else kept if kept in KV_DTYPES else "auto"

    @property
    def int8_queries(self) -> bool:
        return self.cache.endswith(QUERIES)

    @property
    def ordinary(self) -> bool:
        """Whether the cache holds keys and values of ordinary heads, alike in width."""
        return self.rank is None and self.cache not in ("split", *PAIRS)

    @property
    def needs(self) -> AttentionNeeds:
        asked = {
            Feature.ALIBI: self.extra == "alibi", Feature.ENCODER: self.extra in ("cross", "encoder"),
            Feature.SOFTCAP: self.capped, Feature.SINKS: self.capped, Feature.SPARSE: self.cache in SPARSE,
            Feature.INT8_QUERIES: self.int8_queries, Feature.DIFFERENTIAL: self.cache in PAIRS,
            Feature.TREES: self.tree,
        }  # fmt: skip
        return AttentionNeeds(
            H100, dtype_of(self.backend), (9, 0), head_dims=() if self.rank else (self.head_dim,),
            kinds=(FULL, LAYERS[self.kind]), kv_cache_dtype=self.kv_cache_dtype,
            latents=None if self.rank is None else (self.rank, self.rope_dim),
            value_dims={"split": (E,), **dict.fromkeys(PAIRS, (2 * D,))}.get(self.cache, ()),
            page_size=self.page_size, features=GRAPHS[self.graphs].union(f for f, is_asked in asked.items() if is_asked),
        )  # fmt: skip


def dtype_of(backend: str) -> torch.dtype:
    """What the matrix computes in: float32 where it can, for the sharpest comparison; on a GPU what people use."""
    if HAS_GPU:
        return torch.bfloat16
    return torch.float32 if torch.float32 in TABLE[backend].dtypes else torch.float16


def extras_of(cache: str, capped: bool) -> tuple[str, ...]:
    """What models with such a cache, and perhaps softcaps and sinks, have besides."""
    if capped or cache in (INT8_KEYS, *SPARSE) or cache.endswith(QUERIES):
        return ("",)
    return EXTRAS if cache in ("auto", "fp8", "int8") else ("", "alibi")


CELLS = [
    MatrixCell(backend, *values)
    for backend in BACKENDS
    for values in itertools.product(
        KINDS, CACHES, (*PAGE_SIZES, *TABLE[backend].pages.only), (False, True), (False, True), GRAPHS, EXTRAS
    )
    if values[6] in extras_of(values[1], values[4])
    and (values[2] == 4 or not values[1].endswith(QUERIES))  # how queries are rounded does not depend on pages
]


# The table where every package is installed, for thousands of cells: to ask for a package's version takes half a millisecond
COMPLETE = {name: replace(row, machine=row.machine._replace(package=None)) for name, row in TABLE.items()}
ANSWERED = [cell for cell in CELLS if not problem_of(cell.backend, cell.needs, COMPLETE)]
PASSES = [cell for cell in ANSWERED if cell.kind == "full" and not cell.graphs]  # a pass answers layers of all kinds
CAPTURED = [cell for cell in ANSWERED if cell.kind == "full" and cell.graphs]


def combinations_of(cell: MatrixCell) -> set[tuple[Any, ...]]:
    """A cell's backend with every two of the other things in which passes differ."""
    others = [(name, getattr(cell, name)) for name in ("cache", "page_size", "tree", "capped", "extra")]
    return {(cell.backend, *two) for two in itertools.combinations(others, 2)}


def covering(cells: list[MatrixCell]) -> list[MatrixCell]:
    """Some of the cells, which hold every combination that any of them holds."""
    held = {cell: combinations_of(cell) for cell in cells}
    missing, chosen = set().union(*held.values()), set()
    while missing:
        best = max(cells, key=lambda cell: len(held[cell] & missing))
        chosen.add(best)
        missing -= held[best]
    return [cell for cell in cells if cell in chosen]


WALKED = PASSES if HAS_GPU else covering(PASSES)  # Triton's interpreter takes a second for a cell


def label(cell: MatrixCell) -> str:
    shape = ("tree" if cell.tree else "chain") + ("-capped" if cell.capped else "") + (f"-{cell.extra}" if cell.extra else "")
    return f"{cell.backend}-{cell.cache}-{cell.page_size}-{shape}" + (f"-{cell.graphs}" if cell.graphs else "")
