"""Products of experts with many rows each: by our kernel for Hopper GPUs, or whether torch's `F.grouped_mm` can compute them.

Either reads nothing on the host.  Ours wants rows that lie as `place_pairs` says.

Shapes: T tokens, A experts of a token (top_k), P = T * A pairs, R rows of x, E experts, N out, K in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.ops.products.tiles.experts import GROUPED_ALIGN, GROUPED_TILE, GroupedTiles

if TYPE_CHECKING:
    from specdec.ops.products.experts import Activation

Capability = Callable[[torch.device], tuple[int, int]]  # of a GPU
ALIGNMENT = 16  # bytes: the rows of inputs, weights and outputs must be multiples of it


class Places(NamedTuple):
    """Where pairs' rows lie: sorted by expert, of one expert the first pair first, and GROUPED_ALIGN rows between beginnings.

    places_P: int32, the row of each pair; -1: the pair is skipped.  rows: the most that so many pairs can take.
    table: int32 [1 + tiles, 4], which the kernel of products reads (place_pairs_kernel).
    """

    places_P: Tensor
    table: Tensor
    rows: int


def place_pairs(topk_ids_TA: Tensor, experts: int) -> Places:
    """On a GPU alone.  Pairs whose number is `experts` are skipped."""
    from specdec.ops.products.kernels.experts.by_expert_triton import launch_place_pairs

    ids_P = topk_ids_TA.flatten()
    P = len(ids_P)
    rows = (P // GROUPED_ALIGN + min(P, experts)) * GROUPED_ALIGN
    return Places(*launch_place_pairs(ids_P, experts, GROUPED_ALIGN, GROUPED_TILE), rows)


def grouped_linear(
    x_RK: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, places: Places, activation: Activation | None, tiles: GroupedTiles
) -> Tensor:
    """[R, N]: each row's product with its expert's matrix, plus its bias.  activation: what follows, of an MLP's first product.

    A row where no pair lies may hold anything, before and after.
    """
    from specdec.ops.products.kernels.experts.grouped_hopper import launch_grouped_hopper

    return launch_grouped_hopper(x_RK, weight_ENK, bias_EN, places.table, activation, tiles, _sms(x_RK.device))


@cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_grouped_product(weights_ENK: Sequence[Tensor], capability: Capability = torch.cuda.get_device_capability) -> bool:
    """Whether the products with all of these weights can be grouped; decided by shapes, dtypes and the device alone.

    On a GPU this takes bf16 on Hopper or later, where torch reads the groups' sizes on the device.  (On a CPU, reading sizes
    costs no synchronisation.)  Both dims of a weight must be multiples of 16 bytes: they are the row lengths of weights, inputs
    and outputs.
    """
    return all(_is_known(weight.device, weight.dtype, capability) and _is_aligned(weight) for weight in weights_ENK)


def _is_aligned(weight_ENK: Tensor) -> bool:
    return all(size * weight_ENK.element_size() % ALIGNMENT == 0 for size in weight_ENK.shape[1:])


@cache
def _is_known(device: torch.device, dtype: torch.dtype, capability: Capability) -> bool:
    """Whether torch has a grouped product for this device and dtype that reads no sizes on the host of a GPU."""
    if device.type == "cpu":
        return dtype in (torch.float32, torch.float16, torch.bfloat16)
    return device.type == "cuda" and dtype == torch.bfloat16 and capability(device) >= (9, 0)
