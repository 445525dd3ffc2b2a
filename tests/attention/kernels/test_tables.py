"""The kernels that fill tables and move tokens, against their definitions.  Under Triton's interpreter without a GPU.

Shapes: B sequences, P next tokens, W table width, N slots of a sequence, E places on a path.
"""

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.move_triton import launch_move
from specdec.attention.kernels.tables_triton import launch_next_tokens
from specdec.attention.kinds import FULL
from specdec.attention.pages import NextTokens, PageTable

pytestmark = pytest.mark.usefixtures("poisoned_new_memory")


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize(("B", "P"), [(1, 1), (4, 6), (7, 20), (3, 0)])
def test_next_tokens(B: int, P: int, page_size: int, by_step: bool) -> None:
    """Keeps out: rows and steps swapped, slots that run over a page's end; an inactive row of length 0 on the dummy page."""
    lens_B = torch.tensor([[0, page_size - 1, page_size, 37][b % 4] for b in range(B)], dtype=torch.int32)
    width = (37 + P) // page_size + 2
    wide_table = (torch.randperm(B * (width + 3)) + 1).view(B, width + 3).int()
    wide_table[0] = 0
    page_table_BW = wide_table[:, :width]  # rows need not be dense
    positions_BP = lens_B.long()[:, None] + torch.arange(P)
    slots_BP = PageTable(page_table_BW, page_size).slots_at(positions_BP)
    ends_PB = (positions_BP.t() + 1).int()
    want = (positions_BP.t(), slots_BP.t(), ends_PB) if by_step else (positions_BP, slots_BP, ends_PB)
    defined = PageTable(page_table_BW, page_size).next_tokens(lens_B, P, by_step)
    launched = launch_next_tokens(PageTable(wide_table.to(DEVICE)[:, :width], page_size), lens_B.to(DEVICE), P, by_step)
    for got in (defined, launched):
        for name, a, b in zip(NextTokens._fields, got, want, strict=True):
            assert torch.equal(a.cpu(), b) and a.dtype == b.dtype and a.is_contiguous(), name


def random_paths(B: int, N: int, E: int) -> Tensor:
    """Ascending nodes from the root on, then each place's own number; from nothing to everything accepted."""
    path_BE = torch.arange(E).repeat(B, 1)
    for b in range(B):
        a = [0, E - 1, E // 2][b % 3]
        path_BE[b, 1 : a + 1] = (torch.randperm(N - 1)[:a] + 1).sort().values
    return path_BE


def check_move(layers: int, B: int, N: int, E: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    slots_BN = torch.randperm(B * N + 5)[: B * N].view(B, N)
    path_BE = random_paths(B, N, E)
    cache = KVCache(HeadsLayout(heads, dim, dtype), [FULL] * layers, B * N + 5)
    cache.buffers["kv"].copy_(torch.randn(cache.buffers["kv"].shape))
    got = cache.buffers["kv"].to(DEVICE, copy=True)
    cache.move(slots_BN, path_BE)
    launch_move(got, slots_BN.to(DEVICE), path_BE.to(DEVICE))
    assert torch.equal(got.cpu(), cache.buffers["kv"])


@pytest.mark.parametrize(
    ("layers", "B", "N", "E", "heads", "dim"),
    [(2, 3, 16, 6, 2, 40), (1, 3, 60, 8, 1, 5), (3, 2, 5, 5, 3, 8), (1, 1, 40, 33, 2, 64)],
)
def test_moved_tokens_equal_the_definition(layers: int, B: int, N: int, E: int, heads: int, dim: int) -> None:
    """Keeps out: a path that copies what it has just written; a layer, head or column that is not moved."""
    check_move(layers, B, N, E, heads, dim, torch.float32)
    check_move(layers, B, N, E, heads, dim, torch.float16)


def test_any_move_reads_before_it_writes() -> None:
    """Keeps out: a kernel that is right for ascending paths only."""
    kv = torch.arange(10.0)[None, :, None, None, None].expand(2, 10, 2, 1, 4).contiguous().to(DEVICE)
    launch_move(kv, torch.tensor([[2, 3, 4, 5, 6]], device=DEVICE), torch.tensor([[1, 2, 4, 0]], device=DEVICE))
    assert kv[1, :, 1, 0, 3].tolist() == [0, 1, 3, 4, 6, 2, 6, 7, 8, 9]


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "N", "E"), [(1, 32, 6), (32, 60, 8), (2, 1024, 65)])
def test_moves_on_real_sizes(B: int, N: int, E: int) -> None:
    """Repeated: a thread that writes before another has read would fail now and then."""
    for _ in range(5):
        check_move(8, B, N, E, 8, 128, torch.bfloat16)
