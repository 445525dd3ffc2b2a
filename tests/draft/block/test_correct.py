"""Logits corrected by the token before: the kernels against their definitions.  Under Triton's interpreter without a GPU.

Shapes: B sequences, S levels, R rows, W draft vocabulary, V vocabulary, r rank.
"""

from __future__ import annotations

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.draft.block.rounds.correct import corrected_logits, greedy_chain
from specdec.draft.block.rounds.correct_triton import launch_corrected_logits, launch_greedy_chain

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def parts(B: int, S: int, W: int, V: int, r: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(own logits, whose rows are strided; w1; w2): small whole numbers, so that sums are the same in any order."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randint(-40, 40, (B, S + 1, W), generator=generator)[:, :S]
    w1, w2 = (torch.randint(-2, 3, (rows, r), generator=generator) for rows in (V, W))
    return own.to(dtype), w1.to(dtype), w2.to(dtype)


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "each", "W", "r"), [(1, 1, 26, 6), (2, 9, 300, 16), (3, 1, 129, 40)])
def test_logits(B: int, each: int, W: int, r: int, dtype: torch.dtype) -> None:
    """Keeps out: the token of another branch, own logits of another sequence, columns past the rank or the vocabulary."""
    own, w1, w2 = parts(B, 2, W, 50, r, dtype, seed=W)
    before_R = torch.randint(50, (B * each,), generator=torch.Generator().manual_seed(r))
    got = launch_corrected_logits(own[:, 1].to(DEVICE), *(x.to(DEVICE) for x in (before_R, w1, w2)))
    want = corrected_logits(own[:, 1].double(), before_R, w1.double(), w2.double())
    assert got.dtype == dtype and torch.equal(got.double().cpu(), want)
    for row, token in enumerate(before_R.tolist()):
        assert torch.equal(want[row], own[row // each, 1].double() + w2.double() @ w1[token].double())


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize(("B", "S", "W", "r"), [(1, 3, 26, 6), (1, 1, 300, 16), (3, 4, 129, 40)])
def test_chains(B: int, S: int, W: int, r: int, pruned: bool, dtype: torch.dtype) -> None:
    """Keeps out: ties that go to the higher id, a draft's id taken for the target's, a level that reads another's logits."""
    own, w1, w2 = parts(B, S, W, 3 * W, r, dtype, seed=S)
    root_B = torch.randint(W, (B,), generator=torch.Generator().manual_seed(S))
    offsets_W = torch.arange(W) * 2 if pruned else None
    want = greedy_chain(own.double(), root_B, w1.double(), w2.double(), offsets_W)
    offsets = None if offsets_W is None else offsets_W.to(DEVICE)
    got = launch_greedy_chain(*(x.to(DEVICE) for x in (own, root_B, w1, w2)), offsets)
    assert got.tolist() == want.tolist()
    for b, (root, *drawn) in enumerate(want.tolist()):
        before = root
        assert root == int(root_B[b])
        for level, token in enumerate(drawn):
            logits = own[b, level].double() + w2.double() @ w1[before].double()
            assert token == int((logits == logits.max()).nonzero()[0]) * (3 if pruned else 1)
            before = token


def test_a_logit_that_is_no_number() -> None:
    """Keeps out: an index that no vocabulary has, where a row holds NaN."""
    own, w1, w2 = parts(2, 2, 130, 130, 16, torch.float32, seed=0)
    own[0, 0] = torch.nan
    own[1, 1, 129] = torch.nan
    tokens = launch_greedy_chain(*(x.to(DEVICE) for x in (own, torch.tensor([3, 4]), w1, w2)), None)
    assert tokens[0, 1] == 0 and tokens[1, 2] == 129
    assert tokens.min() >= 0 and tokens.max() < 130
