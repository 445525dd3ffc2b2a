"""Tokens of a vocabulary that is cut over ranks: what one rank with all logits would choose."""

import pytest
import torch
from toolkit.parallel.ranks import ThreadGroup, on_ranks
from torch import Tensor

from specdec.ops.noise.filters import Filters
from specdec.ops.noise.gumbel import Noise
from specdec.ops.topk import greedy_tokens, top_tokens
from specdec.parallel.group import Alone
from specdec.parallel.vocabulary import Vocabulary

R = 7


def logits_of(V: int, seed: int) -> Tensor:
    """Few distinct values, so that ties lie on several ranks; a row of one value; rows with NaN, inf, and -inf alone."""
    logits_RV = torch.randint(-3, 4, (R, V), generator=torch.Generator().manual_seed(seed)).float()
    logits_RV[1] = 0.0
    logits_RV[2, V // 2], logits_RV[3, V - 1], logits_RV[4] = torch.nan, torch.inf, -torch.inf
    return logits_RV


@pytest.mark.parametrize(("V", "size"), [(40, 2), (41, 4), (9, 4), (5, 4), (1000, 3)])
def test_greedy_tokens(V: int, size: int) -> None:
    """Keeps out: ties of two runs that go to the higher id; ids counted from a rank's own first; an empty run that wins."""
    logits_RV, offsets_V = logits_of(V, size), torch.randint(0, 9, (V,))

    def choose(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        own = Vocabulary.of(V, group)
        logits_RW = logits_RV[:, own.first : own.first + own.own]
        return own.greedy(logits_RW, finite=True), own.greedy(logits_RW, offsets_V)

    for finite, moved in on_ranks(size, choose):
        assert torch.equal(finite, greedy_tokens(logits_RV, finite=True))
        assert torch.equal(moved, greedy_tokens(logits_RV, offsets_V))


@pytest.mark.parametrize(("V", "size", "k"), [(40, 2, 3), (41, 4, 8), (9, 4, 5), (5, 4, 5), (1000, 3, 10)])
def test_top_tokens(V: int, size: int, k: int) -> None:
    """Keeps out: a rank that may give fewer than k although it holds them all; probabilities of one rank's tokens alone."""
    logits_RV = torch.randn(R, V, generator=torch.Generator().manual_seed(V)).mul(4).round().div(4)
    logits_RV[1] = 0.0

    def choose(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        own = Vocabulary.of(V, group)
        return own.top(logits_RV[:, own.first : own.first + own.own], k)

    logp, ids = top_tokens(logits_RV, k)
    for mine in on_ranks(size, choose):
        assert torch.equal(mine[1], ids)
        torch.testing.assert_close(mine[0], logp)


@pytest.mark.parametrize("has_filters", [False, True])
def test_tokens_of_perturbed_logits(has_filters: bool) -> None:
    """Keeps out: noise by place in a rank's run; filters of one rank's tokens alone; ranks that choose different tokens."""
    V, size, k = 90, 4, 5
    logits_RV, offsets_V = torch.randn(6, V, generator=torch.Generator().manual_seed(1)) * 3, torch.arange(V) * 2
    temperature, seeds = torch.tensor([0.9, 0.0, 1.2]), torch.tensor([3, 4, 5])
    lens = torch.tensor([8, 9, 2], dtype=torch.int32)
    filters = Filters(temperature, torch.tensor([0, 3, 7]), torch.tensor([0.6, 0.5, 1.0]), torch.zeros(3))
    noise = Noise(temperature, seeds, lens, 2, 1.5, 1.2, 2.0, filters if has_filters else None)

    def choose(group: ThreadGroup) -> tuple[Tensor, Tensor, Tensor]:
        own = Vocabulary.of(V, group)
        logits_RW = logits_RV[:, own.first : own.first + own.own]
        return *own.top(logits_RW, k, offsets_V, noise=noise), own.greedy(logits_RW, offsets_V, noise=noise)

    logp, ids = top_tokens(logits_RV, k, offsets_V, noise=noise)
    for mine_logp, mine_ids, best in on_ranks(size, choose):
        assert torch.equal(mine_ids, ids) and torch.equal(best, ids[:, 0])
        torch.testing.assert_close(mine_logp, logp)


@pytest.mark.parametrize("garbage", [torch.nan, -1.0, 1e18])
def test_what_a_lost_rank_did_not_send_is_no_index(garbage: float) -> None:
    """Keeps out: a token beyond the vocabulary, whose embedding a kernel reads: after that the GPU is lost."""

    class Lost(Alone):
        size = 2

        def all_gather(self, x: Tensor) -> Tensor:
            return torch.stack((x, torch.full_like(x, garbage)))

    own = Vocabulary.of(9, Lost())
    for ids in (own.top(torch.randn(R, 5), 3)[1], own.greedy(torch.randn(R, 5))):
        assert ((ids >= 0) & (ids < 9)).all()
