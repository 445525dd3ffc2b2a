"""The kernel that puts unknown pairs after the true ones, against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.draft.block.rounds.pairs import fill_pairs


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
