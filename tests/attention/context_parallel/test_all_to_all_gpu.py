"""The kernels of what ranks exchange, in bfloat16 on a GPU, against float64."""

import pytest
import torch

from specdec.attention.context_parallel.all_to_all import merge_ranks, pack_states
from specdec.attention.state import AttentionState

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("ranks", "T", "H", "E"), [(2, 48, 64, 512), (8, 7, 3, 128), (4, 1, 1, 6)])
def test_exchanged_states_are_merged(ranks: int, T: int, H: int, E: int) -> None:
    """Keeps out: rows that are not aligned, an lse cut to 16 bits, NaN of a rank that keeps no key."""
    dice = torch.Generator("cuda").manual_seed(E)
    out = torch.randn(ranks, T, H * ranks, E, device="cuda", generator=dice).bfloat16()
    lse = torch.randn(ranks, T, H * ranks, device="cuda", generator=dice) * 30
    lse[0, ::2], out[0, ::2] = -torch.inf, torch.nan
    lse[:, -1] = -torch.inf
    with torch.inference_mode():
        pieces = [pack_states(AttentionState(*each), ranks) for each in zip(out, lse, strict=True)]
        got = [merge_ranks(torch.stack([piece[rank] for piece in pieces]), E) for rank in range(ranks)]
    top = lse.double().logsumexp(0)
    weights = (lse.double() - top).exp().where(top > -torch.inf, 0.0)[..., None]
    want = (out.double() * weights).where(weights > 0, 0.0).sum(0)
    for rank, state in enumerate(got):
        own = slice(rank * H, (rank + 1) * H)
        torch.testing.assert_close(state.out_THD.double(), want[:, own], atol=2e-2, rtol=8e-3)
        torch.testing.assert_close(state.lse_TH.double(), top[:, own], atol=1e-4, rtol=1e-5)
