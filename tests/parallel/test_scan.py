"""Scans whose runs of the vocabulary lie on several ranks: what the merges make of them is what they make of whole logits."""

from functools import cache

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

    @cache
    def gathered(k: int, softmax: bool) -> Tensor:
        found: list[Tensor] = []
        for each in runs:
            launch_scan_ranks(each, k, softmax, lambda own_L: found.append(own_L) or own_L[None], 0)  # type: ignore[func-returns-value]
        return torch.stack(found)

    def scan_of(rank: int) -> Scan:
        return lambda logits_RW, k, softmax: launch_scan_ranks(logits_RW, k, softmax, lambda own_L: gathered(k, softmax), rank)

    return [(run, scan_of(rank)) for rank, run in enumerate(runs)]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("V", "size", "k"), [(600, 2, 3), (1200, 4, 4)])
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


@pytest.mark.parametrize("garbage", [0, -1, "random"])
def test_what_a_lost_rank_did_not_send_is_no_index(garbage: int | str) -> None:
    """Keeps out: a token beyond the vocabulary, whose embedding or offset a kernel reads: after that the GPU is lost."""
    V, k = 40, 3
    run_RW = torch.randn(2, V // 2, generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def gather(own_L: Tensor) -> Tensor:
        if garbage == "random":
            return torch.randint(-(2**63), 2**63 - 1, (2, len(own_L)), device=own_L.device)
        return torch.full((2, len(own_L)), garbage, device=own_L.device)

    def scan(logits_RW: Tensor, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
        return launch_scan_ranks(logits_RW, k, softmax, gather, 1)

    for ids in (launch_top_tokens(run_RW, k, None, None, scan)[1], launch_greedy_tokens(run_RW, None, False, scan)):
        assert ((ids >= 0) & (ids < V)).all()
