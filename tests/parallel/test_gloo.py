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


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every second", "expanded"])
def test_tensors_of_any_layout_are_exchanged(layout: str) -> None:
    """Keeps out: numbers in the order of memory instead of the tensor's, and those of a neighbour in memory."""
    store = dist.HashStore()

    def exchange(rank: int) -> tuple[Tensor, Tensor]:
        group = GlooGroup(dist.ProcessGroupGloo(store, rank, SIZE, timedelta(seconds=60)), rank, SIZE)
        return group.all_gather(of_rank(rank, layout)), group.all_to_all(of_rank(rank, layout))

    with ThreadPoolExecutor(SIZE) as pool:
        found = list(pool.map(exchange, range(SIZE)))
    all_N = torch.stack([of_rank(rank, layout).clone() for rank in range(SIZE)])
    for rank, (gathered, received) in enumerate(found):
        assert torch.equal(gathered, all_N) and torch.equal(received, all_N[:, rank])
