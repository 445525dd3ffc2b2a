"""Which products a model's passes consist of: of models known by name, and of checkpoints.

Loads no weights and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from specdec.checks import nearest_name
from specdec.draft.find import find_drafter, open_drafter
from specdec.draft.kinds import kind_of
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.linear import Linear
from specdec.models.registry import choose_target, empty_target
from specdec.ops.products.tuned.table import Product
from specdec.options import EngineOptions


class ModelSizes(NamedTuple):
    """The sizes of a Llama-like target, and of the EAGLE-3 head that is published for it.

    queries, keys: numbers of all heads together.  drafted: the head's vocabulary.
    """

    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocab: int
    drafted: int


NAMED = {
    "llama-3.1-8b": ModelSizes(4096, 14336, 4096, 1024, 128256, 32000),
    "llama-3.3-70b": ModelSizes(8192, 28672, 8192, 1024, 128256, 32000),
    "qwen3-8b": ModelSizes(4096, 12288, 4096, 1024, 151936, 32000),
    "qwen3-32b": ModelSizes(5120, 25600, 8192, 1024, 151936, 32000),
}


def named_products(name: str, dtype: torch.dtype) -> list[Product]:
    """The products of a model of that name and of its EAGLE-3 head.  ValueError for any other name."""
    if name not in NAMED:
        beginning = next((known for known in NAMED if name.strip() and known.startswith(name.strip().lower())), "")
        folder = f"--target {name}" if name.strip() and Path(name).is_dir() else ""
        nearest = folder or nearest_name(name, list(NAMED)) or beginning or f"{next(iter(NAMED))}, or --target DIR"
        raise ValueError(f"MODEL must be one of {', '.join(NAMED)}, got {name!r}; nearest thing that works: {nearest}")
    H, F, Q, K, V, D = NAMED[name]
    shapes = [(Q + 2 * K, H), (H, Q), (H, F), (V, H), (Q + 2 * K, 2 * H), (H, 3 * H), (D, H)]
    return [Product(2 * F, H, True, dtype), *(Product(*shape, False, dtype) for shape in shapes)]


def checkpoint_products(target: str | Path, draft: str | Path | None, dtype: torch.dtype | None) -> list[Product]:
    """The products of a checkpoint and, if given, of its drafter.

    dtype: None: the checkpoint's own.  ValueError if a folder can't be read, or if its products are none of dense weights.
    """
    folder = resolve_target(target, "target")
    chosen = choose_target(folder)
    if chosen.config.quantization is not None:
        raise ValueError(
            f"specdec tune measures products with dense weights, but {folder} is stored as {chosen.config.quantization}; "
            "nearest thing that works: the checkpoint that it was made from"
        )
    if (kind := kind_of(draft)) and not kind.has_files:
        raise ValueError(f"draft={str(draft)!r} has no products to measure; nearest thing that works: leave --draft out")
    models: list[nn.Module] = [empty_target(chosen)]
    options = EngineOptions()
    if drafter := open_drafter(find_drafter(draft, options), options, chosen.config, folder):
        models.append(drafter.model)
    kept = dtype or getattr(torch, chosen.config.dtype or "bfloat16")
    return list(dict.fromkeys(product for model in models for product in products_of(model, kept)))


def products_of(model: nn.Module, dtype: torch.dtype) -> Iterable[Product]:
    """The products of a model, in any order; some may come more than once."""
    for module in model.modules():
        if isinstance(module, Linear) and not module.is_quantised:
            yield Product(module.out_features, module.in_features, "gate_proj" in module.parts.sizes, dtype)
