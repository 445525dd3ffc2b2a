"""What a target's sampling must look like: filtered distributions by the definition, many draws, and a chi-square test."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from specdec import SamplingParams
from specdec.batch.choose import choose_tokens
from specdec.batch.grammars.masks import BitMasks
from specdec.batch.sampling import RowSampling
from specdec.batch.tables import TokenTables
from specdec.engine.needs import RowChoice
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary
from specdec.steps import TokenRules

DRAWS, LIMIT = 200_000, 1e-4  # of a case; and the p-value below which counts do not follow a distribution


class Text(NamedTuple):
    """What stands before the token that is drawn, and what the model's own ends of text are."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    eos: Sequence[int] = ()


NOTHING = Text()


def edited(
    logits: np.ndarray, text: Text, logit_bias: dict[int, float] | None = None, repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0, frequency_penalty: float = 0.0, bad_words: Sequence[Sequence[int]] = (), min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
) -> np.ndarray:  # fmt: skip
    """Logits after the options for single tokens, token by token as SamplingParams defines them, in float64."""
    x, whole = logits.astype(np.float64), [*text.prompt, *text.output]
    for token in range(len(x)):
        x[token] += (logit_bias or {}).get(token, 0.0)
        if token in whole:
            x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
        times = list(text.output).count(token)
        x[token] -= frequency_penalty * times + (presence_penalty if times else 0.0)
    for *before, last in bad_words:
        if whole[len(whole) - len(before) :] == before:
            x[last] = -np.inf
    if len(text.output) < min_tokens:
        x[[*text.eos, *stop_token_ids]] = -np.inf
    return x


def filtered(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, *,
    text: Text = NOTHING, allowed: Sequence[int] | None = None, **rules: Any,
) -> np.ndarray:  # fmt: skip
    """Probabilities after the rules for single tokens, temperature, top-k, top-p (the smallest set that reaches it) and min-p,
    in this order, in float64.

    allowed: the tokens that a grammar leaves; None: all.  rules: options of `edited`.
    """
    if rules:
        logits = edited(logits, text, **rules)
    if allowed is not None:
        logits = np.where(np.isin(np.arange(len(logits)), allowed), logits, -np.inf)
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


def draw(
    logits_RV: Tensor, seed_R: Tensor, position_R: Tensor,
    text: Text = NOTHING, allowed: Sequence[int] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """[R] int64: a token from each row of logits, by the runtime's own sampling code.

    position_R: of the token itself.  text: what stands before it, for the rules that look at it.
    allowed: the tokens that a grammar leaves; None: there is no grammar.  options: of SamplingParams, bad words as ids.
    """
    params, device, (R, V) = SamplingParams(**options), logits_RV.device, logits_RV.shape
    choice = RowChoice.of(params, 0, text.prompt, params.bad_words or (), text.eos)  # type: ignore[arg-type]  # no texts
    rows, vocabulary, needs = RowSampling.of([choice.options], device).expand_rows(R), Vocabulary.of(V, ALONE), choice.needs
    rows.seed_R.copy_(seed_R)
    if choice.rules is not None:
        rows = rows._replace(tables=_tables(choice.rules, text, R, V, device))
    if allowed is not None:
        rows, needs = rows._replace(masks=_masks(allowed, R, V, device)), needs._replace(steps=needs.steps | {"grammar"})
    return choose_tokens(logits_RV, rows, position_R - 1, needs, vocabulary).tokens_R


def _tables(rules: TokenRules, text: Text, rows: int, vocab_size: int, device: torch.device) -> TokenTables:
    """The tables of one row after its text, for every row; without bad words' empty places, which would take seconds."""
    one = TokenTables.neutral(1, vocab_size, device)
    one.enter(0, rules, 0)
    if text.output:
        one.record(torch.tensor([list(text.output)], device=device), torch.tensor([len(text.output)], device=device), 0)
    words = len(rules.bad_words)
    one = replace(one, words_BKM=one.words_BKM[:, :words], word_ends_BK=one.word_ends_BK[:, :words])
    return TokenTables(*(each.expand(rows, *each.shape[1:]) for each in one.tensors()))


def _masks(allowed: Sequence[int], rows: int, vocab_size: int, device: torch.device) -> BitMasks:
    """The same mask for every row."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    words_11X = torch.from_numpy(words.view(np.int32)).to(device)[None, None]
    return BitMasks(words_11X, torch.zeros(rows, dtype=torch.int32, device=device))
