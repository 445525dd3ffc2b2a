"""The merge of the states that attention over rows leaves on Hopper GPUs, and the rule for the number of splits."""

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.attention.latent.limits import latent_splits
from specdec.attention.sparse.rows_launch import BLOCK, MAX_SPLITS, launch_merge
from specdec.attention.state import AttentionState


@pytest.mark.slow_cases
@pytest.mark.parametrize("splits", [2, 7, 19])
def test_merged_states(splits: int) -> None:
    """Splits' states, of which a row leaves the last ones idle.  Keeps out: a head's or a column's state merged into another's,
    outputs of idle splits (NaN), an empty row that is not 0.
    """
    T, H, C = 3, 128, 128
    generator = torch.Generator().manual_seed(splits)
    out_THSC = torch.randn(T, H, splits, C, generator=generator)
    lse_THS = torch.randn(T, H, splits, generator=generator) * 3
    counts_T = torch.tensor([splits * 64, splits * 64 // 2 + 1, 0], dtype=torch.int32)
    live_T = (counts_T + 63) // 64
    idle_TS = torch.arange(splits) >= live_T[:, None]
    lse_THS.masked_fill_(idle_TS[:, None], -torch.inf)
    want_lse_TH = lse_THS.double().logsumexp(2)
    weights_THS = (lse_THS - want_lse_TH.clamp(min=-1e30)[..., None]).exp()
    want_THC = (weights_THS[..., None] * out_THSC).sum(2)
    out_THSC.masked_fill_(idle_TS[:, None, :, None], torch.nan)
    lse_THS.masked_fill_(idle_TS[:, None], torch.nan)
    # [T, tiles, 64, S, C / 8, 8] as the kernel leaves it: [T, tiles, S, C / 8, 64, 8].
    left = out_THSC.view(T, H // 64, 64, splits, C // 8, 8).permute(0, 1, 3, 4, 2, 5).contiguous()
    partial = AttentionState(left.view(T, H, splits, C).to(DEVICE), lse_THS.to(DEVICE))
    state = AttentionState.empty((T, H, C), torch.float32, torch.device(DEVICE))
    launch_merge(partial, state, counts_T.to(DEVICE), splits)
    torch.testing.assert_close(state.out_THD.cpu().double(), want_THC, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state.lse_TH.cpu().double(), want_lse_TH, atol=1e-5, rtol=1e-5)


def test_splits_fill_the_gpu_once() -> None:
    """Keeps out: more splits than the rows' keys have blocks, a second wave that is mostly empty."""

    def splits(tiles: int, keys: int) -> int:
        return latent_splits(tiles, keys, BLOCK, 132, MAX_SPLITS)

    for tiles in (1, 2, 12, 16, 64, 132):
        assert tiles * splits(tiles, 2048) <= 132
    assert splits(1, 2048) == MAX_SPLITS and splits(16, 64) == 1 and splits(132, 2048) == 1
