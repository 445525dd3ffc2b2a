"""What a target's sampling must look like: filtered distributions by the definition, many draws, and a chi-square test."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from specdec import SamplingParams
from specdec.batch.choose import choose_tokens
from specdec.batch.sampling import RowSampling
from specdec.engine.needs import RowChoice
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary

DRAWS, LIMIT = 200_000, 1e-4  # of a case; and the p-value below which counts do not follow a distribution


def filtered(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Probabilities after temperature, then top-k, top-p (the smallest set that reaches it) and min-p, in float64."""
    probs = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-probs, kind="stable")
    if top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    if top_p < 1:
        enough = int(np.searchsorted(probs[order].cumsum(), top_p)) + 1
        probs[order[enough:]] = 0
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


@torch.no_grad()
def token_distributions(
    model: PreTrainedModel, prompt: Sequence[int], transform: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Of three sampled tokens: p(first, second) and p(second, third), [V, V] each, by enumeration."""
    V = model.config.vocab_size
    texts = [[*prompt, a, b] for a in range(V) for b in range(V)]
    logits = model.double()(torch.tensor(texts)).logits[:, -3:].numpy()
    model.float()
    first = transform(logits[0, 0])
    second = np.stack([transform(logits[a * V, 1]) for a in range(V)])
    third = np.stack([[transform(logits[a * V + b, 2]) for b in range(V)] for a in range(V)])
    pairs = first[:, None] * second
    return pairs, np.einsum("ab,abc->bc", pairs, third)


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square; cells of fewer than 5 expected are counted as one.  0 if something impossible was seen."""
    counts, probs = counts.ravel().astype(float), probs.ravel()
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    keep = wanted > 0
    return float(stats.chisquare(seen[keep], wanted[keep] * seen[keep].sum() / wanted[keep].sum()).pvalue)


def pair_counts(ids: Sequence[Sequence[int]], at: int, vocab_size: int) -> np.ndarray:
    """How often each pair of tokens stands at places `at` and `at` + 1."""
    counts = np.zeros((vocab_size, vocab_size))
    for tokens in ids:
        counts[tokens[at], tokens[at + 1]] += 1
    return counts


def draw(logits_RV: Tensor, seed_R: Tensor, position_R: Tensor, **options: Any) -> Tensor:
    """[R] int64: a token from each row of logits, by the runtime's own sampling code.

    position_R: of the token itself.  options: of SamplingParams."""
    choice = RowChoice.of(SamplingParams(**options), 0, prompt_ids=())
    rows = RowSampling.of([choice.options], logits_RV.device).expand_rows(len(seed_R))
    rows.seed_R.copy_(seed_R)
    vocabulary = Vocabulary.of(logits_RV.shape[1], ALONE)
    return choose_tokens(logits_RV, rows, position_R - 1, choice.needs, vocabulary).tokens_R
