"""Scans whose runs of the vocabulary lie on several ranks: what the merges make of them is what they make of whole logits."""

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.ops.topk import greedy_tokens, top_tokens
from specdec.ops.topk_triton import Scan, launch_greedy_tokens, launch_top_tokens
from specdec.parallel.scan_triton import launch_scan_ranks


def rank_scans(logits_RV: Tensor, size: int) -> list[tuple[Tensor, Scan]]:
    """Each rank's logits, and its scan, whose exchange gives what the ranks' own scans have found."""
    runs = logits_RV.chunk(size, dim=1)

    def scan_of(run_RW: Tensor) -> Scan:
        def scan(logits_RW: Tensor, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
            found: list[Tensor] = []
            for each in runs:
                launch_scan_ranks(each, k, softmax, lambda own_L: found.append(own_L) or own_L[None])  # type: ignore[func-returns-value]
            return launch_scan_ranks(logits_RW, k, softmax, lambda own_L: torch.stack(found))

        return scan

    return [(run, scan_of(run)) for run in runs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("V", "size", "k"), [(600, 2, 3), (4400, 4, 8)])
def test_ranks_find_what_one_finds(V: int, size: int, k: int, dtype: torch.dtype) -> None:
    """Keeps out: ids counted from a rank's own first; sums that belong to another slice, or to another row."""
    logits_RV = torch.randn(5, V, generator=torch.Generator().manual_seed(V)).mul(3).to(dtype)
    logits_RV[1] = logits_RV[1].round()
    logits_RV[2] = 0.0
    logits_RV[3, V - 1] = torch.inf
    offsets_V = torch.arange(V) * 2
    logp, ids = top_tokens(logits_RV, k, offsets_V)
    finite = logits_RV.isfinite().all(1)
    for run_RW, scan in rank_scans(logits_RV.to(DEVICE), size)[:: size - 1]:
        got_logp, got_ids = launch_top_tokens(run_RW, k, offsets_V.to(DEVICE), None, scan)
        assert torch.equal(got_ids.cpu(), ids)
        torch.testing.assert_close(got_logp.cpu()[finite], logp[finite], atol=2e-5, rtol=2e-6)
        assert torch.equal(launch_greedy_tokens(run_RW, None, True, scan).cpu(), greedy_tokens(logits_RV, finite=True))
