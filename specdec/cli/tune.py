"""`specdec tune` on the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from specdec.cli.flags import not_empty
from specdec.cli.terminal.output import console

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from specdec.ops.products.tuned.table import Product
    from specdec.tune.measure import ProductBench
    from specdec.tune.run import TunedRow

HELP = "measure which tiles this GPU's products should take, and keep them"
ROWS = (1, 6, 8, 16, 32, 48, 64)
DTYPES = ("bfloat16", "float16")
NAMES = ("llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "qwen3-32b")  # those of shapes.py, which --help does not import


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="MODEL", help=f"a model whose sizes are known: {', '.join(NAMES)}")
    add("--target", type=not_empty, metavar="DIR", help="folder or hub id of a target, or a GGUF file, instead of MODEL")
    add(
        "--draft",
        type=not_empty,
        metavar="DIR",
        help="with --target: folder or hub id of its draft head or a small model, or mtp",
    )
    rows = f"numbers of rows to measure, such as 1,8,32; default: {','.join(map(str, ROWS))}"
    add("--rows", type=_rows, default=ROWS, metavar="N,N", help=rows)
    add("--dtype", choices=DTYPES, help="of the weights; default: the checkpoint's own, or bfloat16")
    add("--device", default="auto", metavar="DEVICE", help="such as cuda:1; default: the current GPU")


class MeasuredGpu(NamedTuple):
    """The GPU that is measured, its name, and what times a product there."""

    device: torch.device
    gpu: str
    make_bench: Callable[[Product, torch.device], ProductBench]


def run(args: argparse.Namespace, machine: MeasuredGpu | None = None) -> int:
    """machine: another one than this."""
    if (args.name is None) == (args.target is None):
        given = "neither" if args.name is None else "both"
        raise ValueError(f"give MODEL or --target, got {given}; nearest thing that works: specdec tune llama-3.1-8b")
    if args.draft is not None and args.target is None:
        raise ValueError("--draft would do nothing without --target: MODEL has its head's sizes with it; leave it out")
    import torch

    from specdec.ops.products.tuned.table import path_for
    from specdec.tune.run import tune
    from specdec.tune.shapes import checkpoint_products, named_products

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    if args.name is not None:
        products = named_products(args.name, dtype or torch.bfloat16)
    else:
        products = checkpoint_products(args.target, args.draft, dtype)
    if wide := {product.dtype for product in products} - {getattr(torch, name) for name in DTYPES}:
        raise ValueError(f"tiles are measured in {' or '.join(DTYPES)}, got {wide.pop()}; nearest setting: --dtype bfloat16")
    device, gpu, make_bench = machine or this_machine(args.device)
    path = path_for(gpu)
    check_folder(path)
    out = console()
    out.print(f"{len(products)} products on {gpu}, at {', '.join(map(str, args.rows))} rows")

    def show(row: TunedRow, done: int, of: int) -> None:
        out.print(line_of(row, done, of), highlight=False, soft_wrap=True)

    table = tune(products, args.rows, args.name or str(args.target), device, show, gpu, make_bench)
    out.print(f"kept in {path}: {table.about}", soft_wrap=True)
    return 0


def this_machine(name: str) -> MeasuredGpu:
    import torch

    from specdec.tune.measure import ProductBench

    device = tunable_gpu(name)
    return MeasuredGpu(device, torch.cuda.get_device_name(device), ProductBench)


def tunable_gpu(name: str) -> torch.device:
    """The GPU.  ValueError if there is none, or if specdec's products don't run there."""
    import torch

    from specdec.loading.resolve import resolve_device
    from specdec.ops.launch import has_pdl, has_triton
    from specdec.options import EngineOptions

    asked = EngineOptions(device=name).device
    if not torch.cuda.is_available():
        raise ValueError("specdec tune measures a GPU, but torch sees none; nearest thing that works: a machine with one")
    device = resolve_device(asked)
    if device.type != "cuda":
        raise ValueError(f"specdec tune measures a GPU, got --device {name}; nearest setting that works: --device cuda")
    if not has_triton() or not has_pdl(device):
        what = "Triton is not installed" if not has_triton() else f"{torch.cuda.get_device_name(device)} is older"
        raise ValueError(
            f"specdec's products run through Triton on compute capability 9.0 or later, but {what}; nearest: nothing is to be "
            "tuned here, cuBLAS computes all products"
        )
    return device


def check_folder(path: Path) -> None:
    """ValueError if the table could not be written.  To be asked before a long run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(path.parent, os.W_OK) and not path.is_dir() else "permission is denied, or it is a folder"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        nearest = "XDG_CACHE_HOME=DIR with a folder of yours"
        raise ValueError(f"{path} can't be written: {problem}; nearest thing that works: {nearest}")


def line_of(row: TunedRow, done: int, of: int) -> str:
    product, tiles = row.product, "cuBLAS" if row.tiles is None else ",".join(map(str, row.tiles))
    kind, rows = " (gate and up)" if product.gated else "", "1 row" if row.M == 1 else f"{row.M} rows"
    verdict = f"-> {row.after:.1f} us with {tiles}" if row.is_kept else "as it was"
    return f"{done:>3}/{of} {product.N} x {product.K}{kind}, {rows}: {row.before:.1f} us {verdict}; {row.tried} tried"


def _rows(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= max(ROWS) for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers from 1 to {max(ROWS)} such as 1,8,32, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))
