"""Filters equal transformers', and ties break by id.

Keeps out: top-p before top-k, sets that stop short of top_p or go beyond it.
"""

import pytest
import torch
from toolkit.parallel.ranks import ThreadGroup, on_ranks, run_of
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec.batch.choose import choose_tokens, cutoff_of, kept_logits, token_scores
from specdec.batch.sampling import RowSampling
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary
from specdec.steps import Needs, RowOptions

FILTERS = [(0.7, 0, 1.0), (1.3, 0, 1.0), (1.3, 5, 1.0), (1.3, 0, 0.8), (0.7, 6, 0.9)]


def rows_of(count: int, temperature: float, top_k: int, top_p: float) -> RowSampling:
    return RowSampling.of(
        [RowOptions.of(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed) for seed in range(count)], "cpu"
    )


def kept(logits: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    vocabulary = Vocabulary.of(logits.shape[1], ALONE)
    return kept_logits(logits, rows, cutoff_of(logits, rows, Needs.of("sampled", "filtered"), vocabulary))


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [*FILTERS, (1.0, 1, 1.0), (1.0, 0, 1e-6), (2.0, 50, 0.999)])
def test_filters_equal_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """Keeps out: top-p before top-k, a set that stops short of top_p, the best token filtered away."""
    logits = 3 * torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    want = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        want = TopKLogitsWarper(min(top_k, 40))(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    got = kept(logits, rows_of(64, temperature, top_k, top_p))
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("min_p", [0.03, 0.3, 1.0])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.6, 7, 0.9)])
@pytest.mark.parametrize("size", [1, 3])
def test_min_p_equals_transformers(temperature: float, top_k: int, top_p: float, min_p: float, size: int) -> None:
    """Keeps out: a threshold of another temperature, of what another filter left, or of one rank's own best token."""
    logits = 3 * torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    want = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        want = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, want))
    want = MinPLogitsWarper(min_p)(None, want)
    rows = RowSampling.of([RowOptions.of(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)] * 64, "cpu")

    def on_rank(group: ThreadGroup) -> torch.Tensor:
        vocabulary = Vocabulary.of(40, group)
        own, needs = run_of(vocabulary, logits), Needs.of("sampled", "min_p", *["filtered"] * (top_k > 0))
        return kept_logits(own, rows, cutoff_of(own, rows, needs, vocabulary), vocabulary.first)

    torch.testing.assert_close(torch.cat(on_ranks(size, on_rank), dim=1), want)


def test_filters_break_ties_by_id() -> None:
    """Keeps out: all of a tie kept or dropped together, so that top_k=2 keeps four."""
    got = kept(torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]]), rows_of(1, 1.0, 2, 1.0))
    assert (got[0] > -torch.inf).tolist() == [True, True, False, False, False]


def test_top_p_stops_where_it_is_reached() -> None:
    """Keeps out: one token more than the smallest set, where its probability is exactly top_p."""
    got = kept(torch.zeros(1, 4), rows_of(1, 1.0, 0, 0.5))
    assert (got[0] > -torch.inf).tolist() == [True, True, False, False]


def test_top_p_adds_up_exactly() -> None:
    """Keeps out: the rounding of a long running sum, which depends on how a library cuts it and moves top-p's cutoff."""
    for count, top_p in ((3000, 0.5), (10000, 0.75)):
        stays = kept(torch.zeros(1, count), rows_of(1, 1.0, 0, top_p)).isfinite()
        assert int(stays.sum()) == count * top_p


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_filters_of_one_row_leave_a_greedy_one_alone(filtered: bool, size: int, dtype: torch.dtype) -> None:
    """Keeps out: a greedy row that is filtered or gets noise beside a sampled one; ranks that gather 16 bits wrongly."""
    logits = (2 * torch.randn(40, 40, generator=torch.Generator().manual_seed(2))).to(dtype)
    needs = Needs.of("sampled", "min_p", *["filtered"] * filtered)
    sampled = RowOptions.of(temperature=1.5, top_p=0.6 if filtered else 1.0, min_p=0.2, seed=3)
    options = [RowOptions.of(min_p=0.5), sampled]
    rows, at = RowSampling.of(options, "cpu"), torch.arange(40) % 20

    def on_rank(group: ThreadGroup) -> torch.Tensor:
        vocabulary = Vocabulary.of(40, group)
        return choose_tokens(run_of(vocabulary, logits), rows, at, needs, vocabulary).tokens_R

    found = on_ranks(size, on_rank)
    assert all(torch.equal(each, found[0]) for each in found) and torch.equal(found[0][:20], logits[:20].argmax(-1))
    scores = token_scores(logits, rows, at, cutoff_of(logits, rows, needs, Vocabulary.of(40, ALONE)))
    assert torch.equal(found[0], scores.argmax(-1)) and not torch.equal(found[0][20:], logits[20:].argmax(-1))
