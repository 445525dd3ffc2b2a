"""Turns the options of requests into what steps hold: the numbers and rules of a row, and what a batch needs of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specdec.config import SamplingParams
from specdec.limits import MAX_BAD_WORD_TOKENS, MAX_LOGPROBS
from specdec.steps import Grammar, Needs, RowOptions, TokenRules

TOPS = (0, 5, MAX_LOGPROBS)  # numbers of likeliest tokens for which graphs are captured
MOST_NEEDS = 16  # combinations for which graphs are captured; a batch with any further one runs every step that ever occurred


class RowChoice(NamedTuple):
    """How a row chooses its tokens.  rules, grammar: None where there are none.  needs: what that takes of a pass."""

    options: RowOptions
    rules: TokenRules | None
    needs: Needs
    grammar: Grammar | None = None

    @classmethod
    def of(
        cls,
        sampling: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]] = (),
        eos_ids: Iterable[int] = (),
    ) -> RowChoice:
        """seed: the caller's, or one that was drawn.  bad_words: those of `sampling` as ids.  eos_ids: the model's own."""
        is_sampled, first_end = sampling.temperature > 0, len(prompt_ids) + sampling.min_tokens
        options = RowOptions(
            sampling.temperature, sampling.top_p, sampling.min_p,
            sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
            sampling.top_k, seed, first_end, int(sampling.logprobs_mode == "processed"),
        )  # fmt: skip
        bias = dict(sampling.logit_bias or {})
        bias.update((word[0], float("-inf")) for word in bad_words if len(word) == 1)
        phrases = tuple(tuple(word) for word in bad_words if len(word) > 1)
        ends = set(sampling.stop_token_ids or ()) | (set() if sampling.ignore_eos else set(eos_ids))
        grammar = None
        if (rule := sampling.grammar_rule) is not None:
            grammar = Grammar(*rule, tuple(sorted({*eos_ids, *(sampling.stop_token_ids or ())})))
        penalties = options.repetition_penalty != 1 or options.presence_penalty != 0 or options.frequency_penalty != 0
        needs = Needs(
            sampled=is_sampled,
            filtered=is_sampled and (sampling.top_k > 0 or sampling.top_p < 1),
            min_p=is_sampled and sampling.min_p > 0,
            bias=bool(bias),
            penalties=penalties,
            bad_words=bool(phrases),
            ends=bool(ends) and sampling.min_tokens > 0,
            grammar=grammar is not None,
            logprobs=0 if sampling.logprobs is None else 1 + min(top for top in TOPS if top >= sampling.logprobs),
            processed=options.processed > 0,
        )
        if not needs.rules:
            return cls(options, None, needs, grammar)
        seen = prompt_ids if options.repetition_penalty != 1 else prompt_ids[-MAX_BAD_WORD_TOKENS:]
        rules = TokenRules(
            tuple(seen) if needs.history else (), tuple(bias.items()), phrases, tuple(sorted(ends)) if needs.ends else ()
        )
        return cls(options, rules, needs, grammar)


class BatchNeeds:
    """What batches need.  A graph is captured for each combination, so there may not be too many of them."""

    def __init__(self) -> None:
        self._known = {Needs(), Needs(sampled=True), Needs(sampled=True, filtered=True)}

    def of(self, rows: Iterable[Needs]) -> Needs:
        """What a batch of rows with these needs runs: what they need and no more, unless too many combinations occurred."""
        found = set(rows)
        needs = found.pop() if len(found) == 1 else union(found)
        if needs not in self._known:
            if len(self._known) >= MOST_NEEDS:
                needs = union({needs, *self._known})
            self._known.add(needs)
        return needs


def union(needs: Iterable[Needs]) -> Needs:
    """What serves all of them."""
    return Needs(*map(max, zip(Needs(), *needs, strict=True)))
