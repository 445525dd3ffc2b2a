"""Exchanges between CPU ranks through gloo, on threads of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from specdec.parallel.group import GlooGroup

SIZE = 3


def of_rank(rank: int, layout: str) -> Tensor:
    """[SIZE, 4, 2] with other numbers on each rank, in memory as the layout says."""
    x = torch.arange(SIZE * 8.0).view(SIZE, 4, 2) + 100 * rank
    if layout == "transposed":
        return x.transpose(0, 2).contiguous().transpose(0, 2)
    if layout == "every second":
        return torch.stack((x, -x), dim=-1)[..., 0]
    return x[:1].expand(SIZE, -1, -1) if layout == "expanded" else x


@pytest.mark.parametrize("around", [False, True], ids=["at once", "around a ring"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every second", "expanded"])
def test_tensors_of_any_layout_are_exchanged(layout: str, around: bool) -> None:
    """Keeps out: numbers in the order of memory instead of the tensor's, and those of a neighbour in memory."""
    store = dist.HashStore()

    def exchange(rank: int) -> tuple[Tensor, Tensor]:
        group = GlooGroup(dist.ProcessGroupGloo(store, rank, SIZE, timedelta(seconds=60)), rank, SIZE)
        group.at_once = -1 if around else group.at_once
        return group.all_gather(of_rank(rank, layout)), group.all_to_all(of_rank(rank, layout))

    with ThreadPoolExecutor(SIZE) as pool:
        found = list(pool.map(exchange, range(SIZE)))
    all_N = torch.stack([of_rank(rank, layout).clone() for rank in range(SIZE)])
    for rank, (gathered, received) in enumerate(found):
        assert torch.equal(gathered, all_N) and torch.equal(received, all_N[:, rank])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64]
)
def test_every_dtype_is_gathered(dtype: torch.dtype) -> None:
    """Keeps out: numbers that gloo does not know, and tensors of one number or of none."""
    store, shapes = dist.HashStore(), ((), (0, 2), (3, 2))

    def exchange(rank: int) -> list[Tensor]:
        group = GlooGroup(dist.ProcessGroupGloo(store, rank, SIZE, timedelta(seconds=60)), rank, SIZE)
        return [group.all_gather(torch.full(shape, rank, dtype=dtype)) for shape in shapes]

    with ThreadPoolExecutor(SIZE) as pool:
        found = list(pool.map(exchange, range(SIZE)))
    for gathered in found:
        for got, shape in zip(gathered, shapes, strict=True):
            assert torch.equal(got, torch.stack([torch.full(shape, rank, dtype=dtype) for rank in range(SIZE)]))
