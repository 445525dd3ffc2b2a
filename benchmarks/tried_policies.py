"""Policies that no whole round has measured yet, by name: what `rounds.round_mixture --ways` puts in place of the product's.

A way changes which kernel or tiles the product chooses, for as long as a block lasts, and no kernel.  Decoders that are built
and captured inside have it.  What wins goes into the policy, and its way goes from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from specdec.attention.kernels import tiles_triton, triton_backend
from specdec.attention.kernels.tiles_triton import SHORT, PagedTiles
from specdec.ops.products.tiles import experts
from specdec.ops.products.tiles.experts import ExpertTiles, MixtureTiles

FORMAT_OF = {"e4m3": "fp8 blocks", "int4": "int4 g128", "e2m1": "mxfp4"}  # as products.expert_tiles names kinds
MOST_SIX = 6  # tokens of e2m1 that few_hopper.py takes in the way "six"


@contextmanager
def tried(ways: str, found: Path | None = None) -> Iterator[None]:
    """ways: names of WAYS, with "+" between them.  found: what products.expert_tiles wrote, which "tiles" and "six" read."""
    names = ways.split("+")
    if wrong := [name for name in names if name not in WAYS]:
        raise ValueError(f"ways: expected names of {', '.join(WAYS)} with '+' between them, got {wrong[0]!r}")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(WAYS[name](found))
        yield


@contextmanager
def policy(found: Path | None) -> Iterator[None]:
    """The product's."""
    yield


@contextmanager
def merge16(found: Path | None) -> Iterator[None]:
    """Merges share out columns down to 16: those of trees' splits then take one round trip to L2 in place of two."""
    with patch.object(tiles_triton, "MIN_COLUMNS", 16):
        tiles_triton.merge_tiles.cache_clear()
        yield
    tiles_triton.merge_tiles.cache_clear()


@contextmanager
def split128(found: Path | None) -> Iterator[None]:
    """Splits of trees' keys have at least 128, and not 64: half as many states to merge."""
    own = triton_backend.hopper_tiles

    def of_trees(*args: Any) -> PagedTiles | None:
        tiles, segment = own(*args), args[2]
        branches = segment.max_seqlen_q > 1 and not segment.causal
        return tiles._replace(min_split_keys=max(128, tiles.min_split_keys)) if tiles and branches else tiles

    with patch.object(triton_backend, "hopper_tiles", of_trees):
        yield


@contextmanager
def single64(found: Path | None) -> Iterator[None]:
    """A single query of heads of 64 is one launch, as of heads of 128.  SmolLM2 lost; gpt-oss has a larger product in front."""
    own = triton_backend.single_query_tiles

    def of_64(group: int, D: int, itemsize: int, waves: float, max_keys: int) -> PagedTiles | None:
        if D == 64 and itemsize == 2 and group <= 16 and waves <= 0.1 and max_keys <= SHORT:
            return PagedTiles(16, 64, 4, 2, min_split_keys=64)
        return own(group, D, itemsize, waves, max_keys)

    with patch.object(triton_backend, "single_query_tiles", of_64):
        yield


@contextmanager
def tiles(found: Path | None) -> Iterator[None]:
    """Experts of one token have the fastest tiles that were found."""
    own, rows = experts.few_hopper_tiles, _rows(found)

    def of_found(tokens: int, kind: experts.ExpertsKind) -> MixtureTiles:
        best = _best(rows, FORMAT_OF.get(kind, ""), 1) if tokens == 1 else None
        return best or own(tokens, kind)

    with patch.object(experts, "few_hopper_tiles", of_found):
        yield


@contextmanager
def six(found: Path | None) -> Iterator[None]:
    """Experts in e2m1 of 2 to 6 tokens are few_hopper.py's, with the fastest tiles that were found of six."""
    own, rows = experts.few_hopper_tiles, _rows(found)

    def of_found(tokens: int, kind: experts.ExpertsKind) -> MixtureTiles:
        best = _best(rows, FORMAT_OF[kind], MOST_SIX) if tokens > 1 and kind == "e2m1" else None
        return best or own(tokens, kind)

    most = experts.MOST_HOPPER | {"e2m1": MOST_SIX}
    with patch.object(experts, "few_hopper_tiles", of_found), patch.object(experts, "MOST_HOPPER", most):
        yield


def _rows(found: Path | None) -> list[dict[str, Any]]:
    if found is None:
        raise ValueError("tiles: expected a FILE of products.expert_tiles for the ways 'tiles' and 'six', got none")
    rows: list[dict[str, Any]] = json.loads(found.read_text())["rows"]
    return rows


def _best(rows: list[dict[str, Any]], name: str, T: int) -> MixtureTiles | None:
    """The fastest of few_hopper.py's whose parts were both tried; None: that format was not."""
    own = [row for row in rows if (row["format"], row["T"], row["part"]) == (name, T, "down")]
    own = [row for row in own if row["tiles"][0] == "few_hopper"]
    if not own:
        return None
    kernel, gate_up, down, chooses = min(own, key=lambda row: float(row["us"]))["tiles"]
    return MixtureTiles(kernel, ExpertTiles(*gate_up), ExpertTiles(*down), chooses)


WAYS: dict[str, Callable[[Path | None], Any]] = {
    way.__name__: way for way in (policy, merge16, split128, single64, tiles, six)
}  # fmt: skip
