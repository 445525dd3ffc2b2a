"""Tiles of products that were measured on this machine, and the file that keeps them.

There is one file for each kind of GPU, in the user's cache.  A file counts for the GPU, the version of Triton and the kernels
with which it was made, and for nothing else.  This module knows no kernel and measures nothing.

Shapes: M rows, K in, N out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.ops.products.tiles.dense import ProductTiles

FORMAT = 2  # of the file
# What measured tiles are true of.
KERNELS = ("dense.py", "../hopper.py", "kernels/dense/stream_triton.py", "kernels/dense/stream_hopper.py", "tiles/dense.py")


class Product(NamedTuple):
    """A product with a weight of N rows and K columns.  gated: whether the weight holds gate and up rows."""

    N: int
    K: int
    gated: bool
    dtype: torch.dtype


class MeasuredProduct(NamedTuple):
    """What was found for a product.

    tiles: by the number of rows; None: cuBLAS.  A number of rows between two takes those of the larger one.
    date: of the measurement.  target: for which it was made.
    """

    tiles: dict[int, ProductTiles | None]
    date: str
    target: str


@dataclass(frozen=True)
class Origin:
    """What a table is true of: a GPU's name, Triton's version, and a digest of specdec's kernels."""

    gpu: str
    triton: str
    kernels: str

    @classmethod
    def here(cls, gpu: str) -> Origin:
        """Of this installation, and a GPU of that name."""
        try:
            triton = version("triton")
        except PackageNotFoundError:
            triton = "none"
        folder = Path(__file__).parent.parent
        digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in KERNELS))
        return cls(gpu, triton, digest.hexdigest()[:16])

    def differs(self, other: Origin) -> str:
        """Why a table of `other` is of no use here; empty if it is."""
        if other.gpu != self.gpu:
            return f"it was made on another GPU, {other.gpu}"
        if other.triton != self.triton:
            return f"it was made with Triton {other.triton}, and this is {self.triton}"
        return "" if other.kernels == self.kernels else "it was made with other kernels of specdec"


@dataclass
class TunedTable:
    """What was measured on GPUs of one kind."""

    origin: Origin
    products: dict[Product, MeasuredProduct] = field(default_factory=dict)

    def find(self, M: int, product: Product) -> tuple[bool, ProductTiles | None]:
        """Whether M rows of that product were measured, and their tiles; None: cuBLAS."""
        measured = self.products.get(product)
        if measured is not None:
            for rows, tiles in measured.tiles.items():
                if 0 < M <= rows:
                    return True, tiles
        return False, None

    @property
    def about(self) -> str:
        """One line for people."""
        dates = sorted({measured.date for measured in self.products.values()})
        targets = sorted({measured.target for measured in self.products.values()})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        return f"those that specdec tune measured here ({when}) for {', '.join(targets)}"

    def save(self, path: Path) -> None:
        """Writes the file, all of it or nothing.  OSError if it can't be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            part.write_text(json.dumps(self._as_data(), indent=1) + "\n")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _as_data(self) -> dict[str, Any]:
        products = [
            {
                "out": product.N, "in": product.K, "gated": product.gated, "dtype": str(product.dtype).removeprefix("torch."),
                "date": found.date, "target": found.target,
                "tiles": {str(rows): None if tiles is None else tiles._asdict() for rows, tiles in found.tiles.items()},
            }
            for product, found in self.products.items()
        ]  # fmt: skip
        return {"format": FORMAT, **vars(self.origin), "products": products}


def path_for(gpu: str) -> Path:
    """Where the table for GPUs of that name is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "specdec" / f"tiles-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def read(path: Path, origin: Origin) -> tuple[TunedTable | None, str]:
    """The table in the file, and why there is none: empty if there is no file, either."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            return None, f"it has format {data['format']!r}, and this is {FORMAT}"
        made = Origin(data["gpu"], data["triton"], data["kernels"])
        if why := origin.differs(made):
            return None, why
        return TunedTable(made, dict(map(_product_of, data["products"]))), ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, f"it can't be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        return None, f"it is damaged ({type(error).__name__}: {error})"


def _product_of(data: dict[str, Any]) -> tuple[Product, MeasuredProduct]:
    dtype = getattr(torch, data["dtype"])
    product = Product(int(data["out"]), int(data["in"]), bool(data["gated"]), dtype)
    tiles = {int(rows): None if each is None else _tiles_of(int(rows), each) for rows, each in data["tiles"].items()}
    assert isinstance(dtype, torch.dtype) and tiles, "no tiles"
    return product, MeasuredProduct(dict(sorted(tiles.items())), str(data["date"]), str(data["target"]))


def _tiles_of(rows: int, data: dict[str, Any]) -> ProductTiles:
    """Tiles of which a launch can be made: a file that somebody changed must not end in an illegal access."""
    tiles = ProductTiles(**data)
    assert tiles.kernel in ("stream_triton", "stream_hopper"), f"a kernel for decoding, got {tiles.kernel!r}"
    assert all(type(number) is int for number in tiles[1:]), f"tiles are integers, got {tuple(tiles)}"
    # A tile of x may have two pieces.  This is the larger one then, else 0.
    of_x = tiles.block_m & (tiles.block_m - 1) if tiles.kernel == "stream_hopper" else 0
    powers = of_x or tiles.block_m, tiles.block_m - of_x, tiles.block_n, tiles.block_k, tiles.warps
    assert all(number > 0 and number & (number - 1) == 0 for number in powers), f"powers of two, got {powers}"
    assert rows <= tiles.block_m and tiles.splits > 0 and tiles.stages > 0, f"{rows} rows, got {tuple(tiles)}"
    return tiles
