"""Each sampling option by chi-square: 200,000 draws follow the distribution that float64 computes by the definition.

Keeps out: noise that favours some tokens, a filter that keeps a token too many or too few, options applied in another order, a
penalty for the wrong tokens, a ban that a temperature or a filter undoes.
"""

from typing import Any

import numpy as np
import pytest
import torch
from toolkit.oracles.statistics import DRAWS, LIMIT, Text, draw, filtered, p_value

from specdec.ops.noise.gumbel import gumbel_noise

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOGITS = {8: torch.linspace(-2, 2, 8), 16: torch.sin(torch.arange(16.0) * 7) * 2.5}
# Options, and what a fault would make of them: an error of a few percent in one number, or of a token in a set.
# A new option is a line here or in RULES, and an argument of `filtered`.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature 1": ({"temperature": 1.0}, {"temperature": 1.04}),
    "cold": ({"temperature": 0.6}, {"temperature": 0.63}),
    "hot": ({"temperature": 1.7}, {"temperature": 1.8}),
    "top-k": ({"temperature": 0.8, "top_k": 4}, {"temperature": 0.8, "top_k": 3}),
    "top-p": ({"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.0, "top_p": 0.97}),
    "min-p": ({"temperature": 1.2, "min_p": 0.3}, {"temperature": 1.2, "min_p": 0.1}),
    "top-k, then top-p": ({"temperature": 1.3, "top_k": 5, "top_p": 0.7}, {"temperature": 1.3, "top_k": 5}),
}
# What the rules look at: bad words go on from the ends of the prompt and of the output, one token of the output stands there
# twice, one of the prompt is not in the output.
TEXT = Text(prompt=(1, 6, 6), output=(7, 7, 2), eos=(5,))
WORDS = ((4,), (7, 2, 6), (6, 7, 7, 2, 0), (7, 6, 1))
WARM, HOT = {"temperature": 1.0}, {"temperature": 1.4}
ALL: dict[str, Any] = dict(
    temperature=0.8, top_p=0.95, logit_bias={1: 2.5, 7: -0.5}, repetition_penalty=1.3, presence_penalty=0.4,
    frequency_penalty=0.3, bad_words=((4,), (7, 2, 0)), min_tokens=4, allowed=(1, 2, 3, 4, 5, 7),
)  # fmt: skip
# Rules for single tokens and a grammar's mask; and for each case, what of the options faults would change.
RULES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "logit_bias": (HOT | {"logit_bias": {0: 1.5, 3: -1.0}}, [{"logit_bias": {0: 1.4, 3: -1.0}}]),
    "logit_bias before temperature": (HOT | {"logit_bias": {0: 1.0, 3: -1.0}}, [{"logit_bias": {0: 1.4, 3: -1.4}}]),
    "repetition_penalty": (
        WARM | {"repetition_penalty": 1.5},
        [{"repetition_penalty": 1.45}, {"text": TEXT._replace(prompt=())}, {"text": TEXT._replace(output=())}],
    ),
    "presence_penalty": (
        WARM | {"presence_penalty": 0.7},
        [{"presence_penalty": 0.65}, {"presence_penalty": 0.0, "frequency_penalty": 0.7}],
    ),
    "frequency_penalty": (
        WARM | {"frequency_penalty": 0.4},
        [{"frequency_penalty": 0.37}, {"frequency_penalty": 0.0, "presence_penalty": 0.4}],
    ),
    "bad_words": (WARM | {"bad_words": WORDS}, [{"bad_words": WORDS[:at] + WORDS[at + 1 :]} for at in range(3)]),
    "min_tokens": (WARM | {"min_tokens": 4, "stop_token_ids": (3,)}, [{"min_tokens": 3}, {"stop_token_ids": ()}]),
    "min_tokens that are reached": (WARM | {"min_tokens": 3, "stop_token_ids": (3,)}, [{"min_tokens": 4}]),
    "grammar": (HOT | {"allowed": (0, 2, 3, 5)}, [{"allowed": (0, 2, 3, 5, 7)}, {"allowed": (0, 2, 3)}]),
    "grammar before top_k": (HOT | {"allowed": (0, 1, 2, 4), "top_k": 3}, [{"top_k": 2}, {"top_k": 4}]),
    "all of them": (ALL, [{"repetition_penalty": 1.25}, {"allowed": None}, {"top_p": 1.0}, {"logit_bias": {1: 2.5}}]),
}


def counts_of(logits_V: torch.Tensor, device: str, over: str, options: dict[str, Any]) -> np.ndarray:
    """How often each token was drawn: over seeds at one position, after TEXT, or over positions under one seed."""
    many, one = torch.arange(DRAWS, device=device), torch.full((DRAWS,), len(TEXT.prompt) + len(TEXT.output), device=device)
    seed_R, position_R = (many, one) if over == "seeds" else (one, many)
    options = options if over == "positions" else options | {"text": TEXT}
    tokens_R = draw(logits_V.to(device).expand(DRAWS, -1), seed_R, position_R, **options)
    return np.bincount(tokens_R.cpu().numpy(), minlength=len(logits_V))


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "over"), [(8, "seeds"), (16, "positions")])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_definition(case: str, size: int, over: str, device: str) -> None:
    options, faulty = CASES[case]
    counts, exact = counts_of(LOGITS[size], device, over, options), LOGITS[size].double().numpy()
    assert p_value(counts, filtered(exact, **options)) > LIMIT
    assert p_value(counts, filtered(exact, **faulty)) < LIMIT, "the test would not see this fault"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", RULES)
def test_draws_after_rules_follow_the_definition(case: str, device: str) -> None:
    """Keeps out: a bias or a penalty after the temperature, or of other tokens; a word that a row completes; an end that comes
    a token too early or too late; a mask that is shifted, or that a filter does not see."""
    options, faults = RULES[case]
    counts, exact = counts_of(LOGITS[8], device, "seeds", options), LOGITS[8].double().numpy()
    assert p_value(counts, filtered(exact, **{"text": TEXT, **options})) > LIMIT
    for fault in faults:
        faulty = filtered(exact, **{"text": TEXT, **options, **fault})
        assert p_value(counts, faulty) < LIMIT, f"the test would not see this fault: {fault}"


@pytest.mark.parametrize("fault", ["low bits", "no position"])
def test_weak_noise_is_seen(fault: str) -> None:
    """Keeps out: a chi-square test that no noise fails."""
    many, one = torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64)
    # A thousand different draws, each 200 times; or one draw.
    noise_RV = gumbel_noise(many % 1000, one, 8) if fault == "low bits" else gumbel_noise(one, many * 0, 8)
    counts = np.bincount((LOGITS[8] + noise_RV).argmax(-1).numpy(), minlength=8)
    assert p_value(counts, filtered(LOGITS[8].numpy(), 1.0)) < LIMIT
    counts = np.bincount((LOGITS[8] + gumbel_noise(many, one, 8)).argmax(-1).numpy(), minlength=8)
    assert p_value(counts, filtered(LOGITS[8].numpy(), 1.0)) > LIMIT
