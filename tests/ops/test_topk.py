"""Top-k by value, then lower index, against numpy: trees are only reproducible if ties are.

Keeps out: a library's own tie order, -0.0 below 0.0, negatives in reverse, and a branch for long rows that differs.
"""

import numpy as np
import pytest
import torch

from specdec.ops.topk import _SORT_UP_TO, stable_topk, top_tokens


def rows(V: int, seed: int) -> np.ndarray:
    """float32 rows of every kind: plain, coarse (ties), all equal, signed zeros, huge and tiny, -inf."""
    rng = np.random.default_rng(seed)
    zeros = np.where(rng.random(V) < 0.5, 0.0, -0.0)
    extreme = rng.choice([-np.inf, -3.4e38, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3.4e38], V)
    kinds = [rng.normal(size=V), -np.abs(rng.normal(size=V)), np.round(rng.normal(size=V)), np.full(V, -2.5), zeros, extreme]
    return np.array(kinds, dtype=np.float32)


@pytest.mark.parametrize("V", [1, 7, 64, _SORT_UP_TO, _SORT_UP_TO + 1, 1000, 128256])
def test_equals_numpy(V: int) -> None:
    values = rows(V, V)
    for k in sorted({1, min(V, 4), min(V, 10), min(V, 64)}):
        order = np.argsort(-values, axis=-1, kind="stable")[:, :k]
        top, indices = stable_topk(torch.from_numpy(values), k)
        assert indices.dtype == torch.int64 and indices.tolist() == order.tolist(), k
        assert np.array_equal(top.numpy(), np.take_along_axis(values, order, -1))


def test_the_row_length_does_not_matter() -> None:
    """Keeps out: short and long rows that order the same values differently."""
    values = torch.from_numpy(rows(_SORT_UP_TO, 3))
    padded = torch.cat((values, values.new_full((len(values), 500), -torch.inf)), dim=1)
    for k in (1, 8, 32):
        assert torch.equal(stable_topk(values, k)[1], stable_topk(padded, k)[1])


def test_more_dimensions_are_more_rows() -> None:
    values = torch.from_numpy(rows(40, 5)).view(2, 3, 40)
    assert torch.equal(stable_topk(values, 6)[1], stable_topk(values.view(6, 40), 6)[1].view(2, 3, 6))


@pytest.mark.parametrize("V", [50, 5000])
def test_log_probabilities_are_of_the_whole_distribution(V: int) -> None:
    """Keeps out: a softmax over the k best only, which makes every draft look certain."""
    logits = torch.from_numpy(rows(V, 1)[:3])
    logp, ids = top_tokens(logits, 5)
    want = logits.double().log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(logp.double(), want, atol=1e-5, rtol=1e-5)
    assert logp.dtype == torch.float32 and bool((logp <= 0).all())
