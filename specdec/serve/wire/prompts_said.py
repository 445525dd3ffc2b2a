"""What an answer says of its prompt: its text before the choice's own (`echo`), its ids and its log-probabilities.

The last two are extensions, in vLLM's form.  Knows no connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from specdec.generation import TokenLogprob
from specdec.serve.wire.logprobs import Piece, completion_logprobs, joined_logprobs, shown_logprob
from specdec.serve.wire.requests import RequestPlan


class ChoicePrompt(NamedTuple):
    """The prompt of a choice: its ids, and its text as an echo shows it."""

    token_ids: Sequence[int]
    text: str


class PromptSaid(NamedTuple):
    """text, logprobs: what comes before the choice's own; None: no log-probabilities.

    choice, answer: fields of the choice, and of the whole answer.
    """

    text: str = ""
    logprobs: dict[str, Any] | None = None
    choice: dict[str, Any] = {}
    answer: dict[str, Any] = {}

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.choice or self.answer)

    def before(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """The log-probabilities of the prompt and then those of the choice."""
        if self.logprobs is None or logprobs is None:
            return logprobs
        return joined_logprobs(self.logprobs, logprobs)


def said_of_prompt(
    plan: RequestPlan, prompt: ChoicePrompt, known: Sequence[TokenLogprob | None] | None, piece: Piece
) -> PromptSaid:
    """known: the log-probabilities of the prompt's tokens, as in Generation; None: they were not asked for."""
    own: dict[str, Any] = {}
    if plan.return_token_ids:
        own["prompt_token_ids"] = list(prompt.token_ids)
    if plan.prompt_logprobs is not None:
        own["prompt_logprobs"] = [_entry(each, plan.prompt_logprobs, piece) for each in known or ()]
    if plan.is_chat:  # a chat has one prompt, and so the answer says it once
        return PromptSaid(answer=own)
    if not plan.echo:
        return PromptSaid(choice=own)
    logprobs = None
    if (top := plan.sampling.logprobs) is not None:
        assert known is not None, "an echo with log-probabilities asks for the prompt's"
        cut = [TokenLogprob(each.token, each.logprob, dict(islice(each.top.items(), top))) for each in known if each]
        text = piece(prompt.token_ids[0])  # one that the tokenizer puts before every text is no part of the echo
        first = {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        begin = len(text) if prompt.text.startswith(text) else 0
        logprobs = joined_logprobs(first, completion_logprobs(cut, piece, begin))
    return PromptSaid(prompt.text, logprobs, own)


def _entry(known: TokenLogprob | None, top: int, piece: Piece) -> dict[str, Any] | None:
    """A token's log-probability and those of the likeliest ones, by id.  rank: null where the token is none of these."""
    if known is None:
        return None
    likeliest = list(islice(known.top.items(), top))
    every = {known.token: (known.logprob, None)} | {other: (logp, rank) for rank, (other, logp) in enumerate(likeliest, 1)}
    return {
        str(token): {"logprob": shown_logprob(logp), "rank": rank, "decoded_token": piece(token)}
        for token, (logp, rank) in every.items()
    }
