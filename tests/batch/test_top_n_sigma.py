"""top_n_sigma against its definition in float64, at nodes of trees, after other options, on one rank and on several."""

from typing import Any

import numpy as np
import pytest
import torch
from toolkit.parallel.ranks import ThreadGroup, on_ranks, run_of

from specdec import SamplingParams
from specdec.batch.choose import edited_logits
from specdec.batch.rules import LogitRows
from specdec.batch.sampling import RowSampling
from specdec.batch.sigma import deviation
from specdec.batch.tables import TokenTables
from specdec.engine.needs import RowChoice, union
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary

V, N = 301, 5
WORDS = [[token] for token in range(91)]  # so many tokens are banned: an odd number, or overflows would cancel out
OPTIONS: list[dict[str, Any]] = [
    dict(temperature=0.7, top_n_sigma=1.0),
    dict(temperature=1.5, top_n_sigma=2.5, repetition_penalty=1.4, logit_bias={7: 9.0}, bad_words=WORDS),
    dict(temperature=1.0, top_n_sigma=0.01),
    dict(temperature=1.0, top_k=3),
    dict(repetition_penalty=1.4, top_n_sigma=1.0),  # greedy
]
pytestmark = pytest.mark.filterwarnings("ignore:top_n_sigma would do nothing")


def kept(x_V: np.ndarray, sigmas: float) -> np.ndarray:
    """Which tokens stay, by the definition."""
    finite = x_V[np.isfinite(x_V)].astype(np.float64)
    least = finite.max() - sigmas * finite.std()
    assert np.abs(finite - least).min() > 1e-5, "a token lies at the cutoff: choose another seed"
    return np.asarray(x_V >= least)


class Batch:
    """Rows with an option each and N nodes of each; and what the same options without top_n_sigma make of their logits."""

    def __init__(self, rows: list[dict[str, Any]], seed: int = 0) -> None:
        self.params = [SamplingParams(**options) for options in rows]
        self.choices = [RowChoice.of(each, 0, [3, 5, 8], each.bad_words or ()) for each in self.params]  # type: ignore[arg-type]
        self.needs = union(choice.needs for choice in self.choices)
        self.logits_RV = 3 * torch.randn(len(rows) * N, V, generator=torch.Generator().manual_seed(seed))

    def edited(self, group: ThreadGroup, without: bool = False) -> torch.Tensor:
        vocabulary = Vocabulary.of(V, group)
        tables = TokenTables.neutral(len(self.params), vocabulary.own, "cpu")
        for row, choice in enumerate(self.choices):
            if choice.rules is not None:
                tables.enter(row, choice.rules, vocabulary.first)
        sampling = RowSampling.of([choice.options for choice in self.choices], "cpu")._replace(tables=tables)
        needs = self.needs._replace(steps=self.needs.steps - {"top_n_sigma"}) if without else self.needs
        rows = LogitRows(sampling, torch.full((len(self.logits_RV),), 3), vocabulary)
        return edited_logits(run_of(vocabulary, self.logits_RV), rows, needs)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_near_the_best_stay(seed: int) -> None:
    """Keeps out: a deviation that banned tokens count in, or that is taken before penalties; one row's or node's for another;
    a greedy row, or one without the option, that loses tokens."""
    batch = Batch(OPTIONS, seed)
    before, after = batch.edited(ALONE, without=True).numpy(), batch.edited(ALONE).numpy()  # type: ignore[arg-type]
    for row, (x_V, got_V) in enumerate(zip(before, after, strict=True)):
        params = batch.params[row // N]
        sigmas = params.top_n_sigma if params.temperature > 0 else 0
        want = kept(x_V, sigmas) if sigmas else np.isfinite(x_V)
        assert (np.isfinite(got_V) == want).all() and (got_V[want] == x_V[want]).all(), row
        assert want.sum() == 1 if sigmas == 0.01 else want.sum() > 1


@pytest.mark.parametrize("size", [2, 6, 8])
def test_ranks_keep_the_same_tokens(size: int) -> None:
    """Keeps out: a deviation of a rank's own run, and sums whose bits depend on how many ranks or rows there are."""
    batch = Batch(OPTIONS)
    whole = batch.edited(ALONE)  # type: ignore[arg-type]
    assert torch.equal(torch.cat(on_ranks(size, batch.edited), dim=1), whole)
    for row in range(len(OPTIONS)):
        alone = Batch(OPTIONS[row : row + 1])
        alone.logits_RV = batch.logits_RV[row * N : (row + 1) * N]
        assert torch.equal(alone.edited(ALONE), whole[row * N : (row + 1) * N].to(alone.logits_RV))  # type: ignore[arg-type]


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf, 0.0], ids=str)
@pytest.mark.parametrize("everywhere", [True, False])
def test_rows_without_a_deviation_stay_as_they_are(special: float, everywhere: bool) -> None:
    """Keeps out: a row of NaN or inf that looks finite afterwards, and equal logits of which some go."""
    batch = Batch([dict(temperature=1.0, top_n_sigma=1.0)])
    batch.logits_RV[:, slice(None) if everywhere else 4] = special
    if everywhere or not np.isfinite(special) and special != -torch.inf:
        assert batch.edited(ALONE).allclose(batch.logits_RV, equal_nan=True)  # type: ignore[arg-type]
    else:
        assert batch.edited(ALONE).isneginf().any(-1).all()  # type: ignore[arg-type]


def test_the_deviation_of_logits_that_lie_together() -> None:
    """Keeps out: squares that lose the digits of a small deviation far from the middle of the span."""
    rows = torch.full((3, 4096), -72.0)
    rows[1] += 1e-2 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    rows[:, 0], rows[:, 1], rows[2, 5:9] = 0.0, -100.0, -torch.inf
    got = deviation(rows, rows.amax(-1), Vocabulary.of(4096, ALONE))
    want = [row[np.isfinite(row)].std() for row in rows.double().numpy()]
    assert np.allclose(got.numpy(), want, rtol=2e-6)
