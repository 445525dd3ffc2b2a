"""Turns the options of requests into what steps hold: the numbers and rules of a row, and what a batch needs of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import NamedTuple

from specdec.config import SAMPLING_OPTIONS, SamplingParams, changed_options
from specdec.grammar.wait import Wait
from specdec.grammar.wait_table import WaitTable
from specdec.limits import MAX_BAD_WORD_TOKENS, MAX_LOGPROBS, MOST_LOGPROBS
from specdec.steps import Grammar, Needs, RowOptions, TokenRules

TOPS = (0, 5, MAX_LOGPROBS, 64, 256, MOST_LOGPROBS)  # numbers of likeliest tokens for which graphs are captured
MAX_NEEDS = 16  # combinations for which graphs are captured; a batch with any further one runs every step that ever occurred


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
        trees: bool = False,
    ) -> RowChoice:
        """seed: the caller's, or one that was drawn.  bad_words: those of `sampling` as ids.  eos_ids: the model's own.
        trees: see Needs.
        """
        bias = dict(sampling.logit_bias or {})
        bias.update((word[0], float("-inf")) for word in bad_words if len(word) == 1)
        phrases = tuple(tuple(word) for word in bad_words if len(word) > 1)
        ends = set(sampling.stop_token_ids or ()) | (set() if sampling.ignore_eos else set(eos_ids))
        grammar = None
        if (rule := sampling.grammar_rule) is not None:
            grammar = Grammar(*rule, tuple(sorted({*eos_ids, *(sampling.stop_token_ids or ())})))
        is_processed = sampling.logprobs_mode == "processed"
        steps = _steps_of_numbers(sampling) | ({"grammar"} if grammar else set()) | ({"processed"} if is_processed else set())
        others = {"bias": bias, "bad_words": phrases, "ends": ends and sampling.min_tokens}
        steps |= {step for step, value in others.items() if value}
        logprobs = 0 if sampling.logprobs is None else 1 + tops_for(sampling.logprobs)
        needs = Needs.of(*steps, logprobs=logprobs, trees=trees)
        own = {name: getattr(sampling, name) for name, declared in SAMPLING_OPTIONS.items() if declared.column}
        first_end = len(prompt_ids) + sampling.min_tokens
        options = RowOptions.of(**{**own, "seed": seed, "first_end": first_end, "processed": is_processed})
        if not needs.rules:
            return cls(options, None, needs, grammar)
        seen = prompt_ids if sampling.repetition_penalty != 1 else prompt_ids[-MAX_BAD_WORD_TOKENS:]
        banned = tuple(sorted(ends)) if "ends" in steps else ()
        rules = TokenRules(tuple(seen) if needs.history else (), tuple(bias.items()), phrases, banned)
        return cls(options, rules, needs, grammar)

    def waiting(self, wait: Wait, table: WaitTable | None) -> RowChoice:
        """The same of a row whose grammar begins to hold later.  table: see RowEntry.waits."""
        assert self.grammar is not None
        choice = self._replace(grammar=self.grammar._replace(wait=wait))
        if table is None:
            return choice
        if not table.bans_ends:
            return choice.with_steps("waits")
        # Rounds without masks ban the ends of such a row everywhere; others before min_tokens alone, as with any rule.
        rules = replace(self.rules or TokenRules(), ends=self.grammar.ends)
        return choice.with_steps("waits", "ends")._replace(rules=rules)

    def with_steps(self, *steps: str) -> RowChoice:
        """The same of a row that needs more of drafts."""
        return self._replace(needs=union((self.needs, Needs.of(*steps))))


def tops_for(count: int) -> int:
    """How many likeliest tokens are computed where so many are wanted."""
    return min(top for top in TOPS if top >= count)


def _steps_of_numbers(sampling: SamplingParams) -> set[str]:
    """What the numbers that a row's table holds take of a pass, which is less in greedy rows."""
    changed = [SAMPLING_OPTIONS[name] for name in changed_options(sampling)]
    return {each.step for each in changed if each.column and each.step and (each.greedy or sampling.temperature > 0)}


class BatchNeeds:
    """What batches need.  A graph is captured for each combination, so there may not be too many of them."""

    def __init__(self) -> None:
        self._known = {Needs(), Needs.of("sampled"), Needs.of("sampled", "filtered")}

    def of(self, rows: Iterable[Needs]) -> Needs:
        """What a batch of rows with these needs runs: what they need and no more, unless too many combinations occurred."""
        found = set(rows)
        needs = found.pop() if len(found) == 1 else union(found)
        if needs not in self._known:
            if len(self._known) >= MAX_NEEDS:
                needs = union({needs, *self._known})
            self._known.add(needs)
        return needs


def union(needs: Iterable[Needs]) -> Needs:
    """What serves all of them."""
    return reduce(or_, needs, Needs())
