"""Log-probabilities on one rank and on several that share the vocabulary: those of float64 over whole logits."""

import pytest
import torch
from toolkit.parallel.ranks import ThreadGroup, on_ranks, run_of
from torch import Tensor

from specdec.batch.logprobs import token_logprobs
from specdec.parallel.vocabulary import Vocabulary

V = 11


@pytest.mark.parametrize("size", [1, 2, 4])  # with 4 the last rank's run is shorter
@pytest.mark.parametrize("top", [0, 3, V])
def test_each_rank_has_the_numbers_of_whole_logits(size: int, top: int) -> None:
    """Keeps out: a rank that adds a logit of its own where the token is another's, and likeliest ids counted from its run."""
    logits_RV = 3 * torch.randn(V, V, generator=torch.Generator().manual_seed(0))
    logits_RV[2, 5], tokens_R = -torch.inf, torch.arange(V)

    def on_rank(group: ThreadGroup) -> Tensor:
        vocabulary = Vocabulary.of(V, group)
        return token_logprobs(run_of(vocabulary, logits_RV), tokens_R, top, vocabulary)

    exact_RV = logits_RV.double().log_softmax(-1)
    likeliest_Rk, ids_Rk = exact_RV.topk(top)
    for found_RX in on_ranks(size, on_rank):
        torch.testing.assert_close(found_RX[:, 0], exact_RV.diagonal(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found_RX[:, 1 : 1 + top], likeliest_Rk, atol=1e-5, rtol=1e-5)
        assert torch.equal(found_RX[:, 1 + top :].long(), ids_Rk)
