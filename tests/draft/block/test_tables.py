"""The kernels that fill a pass's tables, against their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.attention.pages import PageTable
from specdec.draft.block.rounds.pairs import fill_pairs
from specdec.draft.block.rounds.tables import block_tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("B", "E", "W", "H"), [(1, 1, 5, 40), (3, 6, 10, 1100)])
def test_pairs(B: int, E: int, W: int, H: int, dtype: torch.dtype) -> None:
    """Keeps out: padding of the emitted tokens, which may be NaN, taken for a pair; a row's pairs in another row's places."""
    from specdec.draft.block.rounds.pairs_triton import launch_fill_pairs

    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(E)
    tokens_BE = torch.randint(90, (B, E), generator=generator)
    last_B = torch.randint(E, (B,), generator=generator)
    fused_BEH, mask_1H = (torch.randn(shape, generator=generator).to(dtype) for shape in ((B, E, H), (1, H)))
    fused_BEH[torch.arange(E) > last_B[:, None]] = torch.nan
    want = fill_pairs(tokens_BE, last_B, fused_BEH, 99, mask_1H, W)
    for b in range(B):
        true = int(last_B[b]) + 1
        assert want[0][b].tolist() == [*tokens_BE[b, :true].tolist(), *[99] * (W - true)]
        assert torch.equal(want[1][b, :true], fused_BEH[b, :true]) and bool((want[1][b, true:] == mask_1H).all())
    given = (x.to(device) for x in (tokens_BE, last_B, fused_BEH))
    got = launch_fill_pairs(*given, 99, mask_1H.to(device), W)
    assert all(torch.equal(mine.cpu(), its) for mine, its in zip(got, want, strict=True))


@pytest.mark.parametrize(("B", "E", "N", "page_size"), [(1, 1, 2, 1), (3, 6, 16, 4), (9, 3, 12, 16)])
def test_tables_of_blocks(B: int, E: int, N: int, page_size: int) -> None:
    """Keeps out: a token that was not accepted stored over the block, a block of another row's pages, another anchor."""
    from specdec.draft.block.rounds.tables_triton import launch_block_tables

    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(N)
    pages = PageTable((1 + torch.randperm(B * 40, generator=generator)).int().view(B, 40), page_size)
    base_B, last_B = torch.randint(18, (B,), generator=generator).int(), torch.randint(E, (B,), generator=generator)
    tokens_BE = torch.randint(90, (B, E), generator=generator)
    lens_B = base_B + last_B.int() + 1
    want = block_tables(pages, base_B, lens_B, tokens_BE, last_B, N, 99)
    assert want.ids_BN.tolist() == [[int(tokens_BE[b, last_B[b]]), *[99] * (N - 1)] for b in range(B)]
    kept = want.slots_T[B * N :].view(B, E) > 0
    assert torch.equal(kept, torch.arange(E) <= last_B[:, None])
    written = [slot for slot in want.slots_T.tolist() if slot]
    assert len(set(written)) == len(written) == B * N + int(kept.sum())
    given = (x.to(device) for x in (base_B, lens_B, tokens_BE, last_B))
    got = launch_block_tables(pages.to(device), *given, N, 99)
    assert all(torch.equal(mine.cpu(), its) for mine, its in zip(got, want, strict=True))
