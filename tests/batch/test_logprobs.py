"""Log-probabilities on one rank and on several that share the vocabulary: those of float64 over whole logits."""

import itertools

import pytest
import torch
from toolkit.parallel.ranks import ThreadGroup, on_ranks, run_of

from specdec.batch.emitted import read_logprobs, token_logprobs
from specdec.generation import Logprobs
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary

V = 11


@pytest.mark.parametrize("size", [1, 2, 4])  # with 4 the last rank's run is shorter
@pytest.mark.parametrize("top", [0, 3, V])
def test_each_rank_has_the_numbers_of_whole_logits(size: int, top: int) -> None:
    """Keeps out: a rank that adds a logit of its own where the token is another's, and likeliest ids counted from its run."""
    logits_RV = 3 * torch.randn(V, V, generator=torch.Generator().manual_seed(0))
    logits_RV[2, 5], tokens_R = -torch.inf, torch.arange(V)

    def on_rank(group: ThreadGroup) -> list[list[Logprobs]]:
        vocabulary = Vocabulary.of(V, group)
        return read_logprobs(token_logprobs(run_of(vocabulary, logits_RV), tokens_R, top, vocabulary))

    exact_RV = logits_RV.double().log_softmax(-1)
    likeliest_Rk, ids_Rk = exact_RV.topk(top)
    want_RX = torch.cat((exact_RV.diagonal()[:, None], likeliest_Rk), dim=1)
    for found in on_ranks(size, on_rank):
        values_RX = torch.tensor([each.values for (each,) in found], dtype=torch.float64)
        torch.testing.assert_close(values_RX, want_RX, atol=1e-5, rtol=1e-5)
        assert [each.ids for (each,) in found] == ids_Rk.tolist()


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("V", [2048, 4999])
def test_a_row_s_numbers_depend_on_its_logits_alone(V: int) -> None:
    """Keeps out: a sum in another order beside other rows, beside rows that want more tokens, or in another type, by which
    texts in deterministic mode have other log-probabilities when they are computed again."""
    logits_RV = (3 * torch.randn(70, V, generator=torch.Generator().manual_seed(V))).to("cuda", torch.bfloat16)
    tokens_R, vocabulary = torch.arange(70, device="cuda"), Vocabulary.of(V, ALONE)
    (want,) = read_logprobs(token_logprobs(logits_RV[:1], tokens_R[:1], 20, vocabulary))[0]
    for dtype, rows, top in itertools.product((torch.bfloat16, torch.float32), (1, 6, 70), (0, 5, 20)):
        (found,) = read_logprobs(token_logprobs(logits_RV[:rows].to(dtype), tokens_R[:rows], top, vocabulary))[0]
        assert found == Logprobs(want.values[: top + 1], want.ids[:top]), (dtype, rows, top)
