"""The operators of products, norms and top tokens, the function of each, and arguments for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import specdec.ops.norm as norm
import specdec.ops.products.dense as products
import specdec.ops.topk as topk

Case = Callable[[torch.device], tuple[Any, ...]]


def rand(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device)


def strided(device: torch.device, rows: int, columns: int) -> Tensor:
    """Rows that are slices of longer rows."""
    return rand(device, rows, columns + 5)[:, :columns]


CASES: dict[str, tuple[Any, Callable[..., Any], Case]] = {
    "linear": (products.LINEAR, products.linear, lambda d: (rand(d, 5, 48), rand(d, 32, 48))),
    "linear bias": (products.LINEAR, products.linear, lambda d: (strided(d, 5, 48), rand(d, 32, 48), rand(d, 32))),
    "linear 3 dims": (products.LINEAR, products.linear, lambda d: (rand(d, 2, 3, 48), rand(d, 32, 48))),
    "linear no rows": (products.LINEAR, products.linear, lambda d: (rand(d, 0, 48), rand(d, 32, 48))),
    "gated": (products.GATED_LINEAR, products.gated_linear, lambda d: (rand(d, 5, 48), rand(d, 64, 48))),
    "gated bias": (products.GATED_LINEAR, products.gated_linear, lambda d: (strided(d, 5, 48), rand(d, 64, 48), rand(d, 64))),
    "norm": (norm.RMS_NORM, norm.rms_norm, lambda d: (rand(d, 5, 48), rand(d, 48), 1e-6)),
    "norm strided": (norm.RMS_NORM, norm.rms_norm, lambda d: (strided(d, 5, 48), rand(d, 48), 1e-6)),
    "norm 3 dims": (norm.RMS_NORM, norm.rms_norm, lambda d: (rand(d, 3, 5, 48).transpose(0, 1), rand(d, 48), 1e-6)),
    "add norm": (norm.ADD_RMS_NORM, norm.add_rms_norm, lambda d: (rand(d, 5, 48), rand(d, 5, 48), rand(d, 48), 1e-6)),
    "add norm strided": (
        norm.ADD_RMS_NORM, norm.add_rms_norm, lambda d: (strided(d, 5, 48), strided(d, 5, 48), rand(d, 48), 1e-6)
    ),
    "top": (topk.TOP_TOKENS, topk.top_tokens, lambda d: (rand(d, 3, 40), 4)),
    "top offsets": (topk.TOP_TOKENS, topk.top_tokens, lambda d: (rand(d, 2, 3, 700), 5, torch.arange(700, device=d))),
    "greedy": (topk.GREEDY_TOKENS, topk.greedy_tokens, lambda d: (rand(d, 3, 40),)),
    "greedy finite": (
        topk.GREEDY_TOKENS,
        lambda logits, offsets, finite: topk.greedy_tokens(logits, offsets, finite=finite),
        lambda d: (rand(d, 2, 3, 40), torch.arange(40, device=d), True),
    ),
}  # fmt: skip
