"""Each sampling option by chi-square: 200,000 draws follow the distribution that float64 computes by the definition.

Keeps out: noise that favours some tokens, a filter that keeps a token too many or too few, options applied in another order.
"""

from typing import Any

import numpy as np
import pytest
import torch
from toolkit.oracles.statistics import DRAWS, LIMIT, draw, filtered, p_value

from specdec.batch import choose
from specdec.ops.noise import sample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOGITS = {8: torch.linspace(-2, 2, 8), 16: torch.sin(torch.arange(16.0) * 7) * 2.5}
# Options, and what a fault would make of them: an error of a few percent in one number, or of a token in a set.
# A new option is a line here, and an argument of `filtered`.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature 1": ({"temperature": 1.0}, {"temperature": 1.04}),
    "cold": ({"temperature": 0.6}, {"temperature": 0.63}),
    "hot": ({"temperature": 1.7}, {"temperature": 1.8}),
    "top-k": ({"temperature": 0.8, "top_k": 4}, {"temperature": 0.8, "top_k": 3}),
    "top-p": ({"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.0, "top_p": 0.97}),
    "min-p": ({"temperature": 1.2, "min_p": 0.3}, {"temperature": 1.2, "min_p": 0.1}),
    "top-k, then top-p": ({"temperature": 1.3, "top_k": 5, "top_p": 0.7}, {"temperature": 1.3, "top_k": 5}),
}


def counts_of(logits_V: torch.Tensor, device: str, over: str, options: dict[str, Any]) -> np.ndarray:
    """How often each token was drawn: over seeds at one position, or over positions under one seed."""
    many, one = torch.arange(DRAWS, device=device), torch.full((DRAWS,), 5, device=device)
    seed_R, position_R = (many, one) if over == "seeds" else (one, many)
    tokens_R = draw(logits_V.to(device).expand(DRAWS, -1), seed_R, position_R, **options)
    return np.bincount(tokens_R.cpu().numpy(), minlength=len(logits_V))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "over"), [(8, "seeds"), (16, "positions")])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_definition(case: str, size: int, over: str, device: str) -> None:
    options, faulty = CASES[case]
    counts, exact = counts_of(LOGITS[size], device, over, options), LOGITS[size].double().numpy()
    assert p_value(counts, filtered(exact, **options)) > LIMIT
    assert p_value(counts, filtered(exact, **faulty)) < LIMIT, "the test would not see this fault"


@pytest.mark.parametrize("fault", ["low bits", "no position"])
def test_weak_noise_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a chi-square test that no noise fails."""
    original = choose.gumbel_noise

    def weak(seed_R: torch.Tensor, position_R: torch.Tensor, vocab_size: int, first: int = 0) -> torch.Tensor:
        if fault == "low bits":  # a thousand different draws, each 200 times
            return original(seed_R % 1000, position_R, vocab_size, first)
        return original(seed_R, position_R * 0, vocab_size, first)

    for module in (choose, sample):
        monkeypatch.setattr(module, "gumbel_noise", weak)
    over = "seeds" if fault == "low bits" else "positions"
    assert p_value(counts_of(LOGITS[8], "cpu", over, {"temperature": 1.0}), filtered(LOGITS[8].numpy(), 1.0)) < LIMIT
