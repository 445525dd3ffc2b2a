"""Which rank keeps which token: ranks partition every sequence, and agree with one page table about where."""

import itertools

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.attention.context_parallel.sharding import KVSharding
from specdec.attention.context_parallel.sharding_triton import launch_local_lens, launch_local_slots
from specdec.attention.pages import PageTable

PAGES = torch.tensor([[5, 2, 7, 1, 6, 3], [4, 9, 8, 12, 10, 11]], dtype=torch.int32)


def rank_by_definition(position: int, ranks: int, run: int) -> int:
    return position // run % ranks


@pytest.mark.parametrize(
    ("ranks", "page_size", "run"),
    [(r, p, run) for r, p in itertools.product((2, 3, 4, 8), (1, 4, 6)) for run in range(1, p + 1) if p % run == 0],
)
def test_ranks_partition_a_sequence(ranks: int, page_size: int, run: int) -> None:
    """Keeps out: a token that two ranks keep, or none; a slot that two tokens of a rank share; a count that misses one."""
    owners = [KVSharding(rank, ranks, page_size, run) for rank in range(ranks)]
    length = PAGES.shape[1] * page_size * ranks
    whole = PageTable(PAGES, page_size * ranks)
    slots_BP = whole.slots_at(torch.arange(length).expand(2, length))
    for each in owners:
        mine = torch.tensor([rank_by_definition(p, ranks, run) == each.rank for p in range(length)])
        own_BP = each.local_slots(slots_BP)
        assert bool((own_BP[:, ~mine] < page_size).all()), "tokens of others go to the dummy page"
        in_order_BP = each.local_pages(whole).slots_at(torch.arange(length // ranks).expand(2, -1))
        assert torch.equal(own_BP[:, mine], in_order_BP), "own tokens fill the rank's part of the pages, in order"
        lens = torch.arange(length + 1, dtype=torch.int32)
        counts = each.local_lens(lens)
        assert counts.dtype == torch.int32 and counts.tolist() == [int(mine[:n].sum()) for n in range(length + 1)]
        assert all(each.max_local(n) >= int(counts[n]) for n in range(length + 1))
    assert all(
        owners[0].max_local(n) == max(int(each.local_lens(lens[n])) for each in owners) for n in range(0, length, ranks * run)
    )


@pytest.mark.parametrize(("rank", "ranks", "page_size", "run"), [(0, 2, 4, 2), (2, 3, 6, 6), (7, 8, 16, 1)])
def test_kernels_equal_their_definition(rank: int, ranks: int, page_size: int, run: int) -> None:
    """Keeps out: the end of a sequence, or of a block, that a kernel leaves out."""
    each = KVSharding(rank, ranks, page_size, run)
    lens, slots = torch.arange(301, dtype=torch.int32), torch.arange(900).view(2, 450)
    assert torch.equal(launch_local_lens(each, lens.to(DEVICE)).cpu(), each.local_lens(lens))
    assert torch.equal(launch_local_slots(each, slots.to(DEVICE), 0).cpu(), each.local_slots(slots))


def test_slots_of_the_dummy_page_stay_there() -> None:
    """Keeps out: padding that is written to a page of a request."""
    each = KVSharding(1, 4, 4, 2)
    assert bool((each.local_slots(torch.arange(16)) < 4).all())
