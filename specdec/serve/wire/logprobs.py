"""Log-probabilities of tokens in OpenAI's two forms, that of completions and that of chats.  Knows no connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from specdec.generation import TokenLogprob

Piece = Callable[[int], str]  # the text of a token
MIN_LOGPROB = -9999.0  # what OpenAI's API writes for a probability of 0, of which JSON has no logarithm


def completion_logprobs(tokens: Sequence[TokenLogprob], piece: Piece, offset: int) -> dict[str, Any]:
    """The form of /v1/completions.  offset: the characters of the texts of earlier tokens.

    The likeliest tokens are keyed by their texts; the token itself is always among them.
    """
    texts = [piece(each.token) for each in tokens]
    offsets = list(accumulate(map(len, texts), initial=offset))[:-1]
    own = [shown_logprob(each.logprob) for each in tokens]
    by_id = ({each.token: each.logprob, **each.top} for each in tokens)
    tops = [{piece(other): shown_logprob(logprob) for other, logprob in likeliest.items()} for likeliest in by_id]
    return {"tokens": texts, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}


def joined_logprobs(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The form of /v1/completions of some tokens and then of others."""
    return {name: [*before[name], *after[name]] for name in before}


def chat_logprobs(tokens: Sequence[TokenLogprob], piece: Piece) -> dict[str, Any]:
    """The form of /v1/chat/completions."""
    tops = ([_entry(piece(other), logprob) for other, logprob in each.top.items()] for each in tokens)
    content = [{**_entry(piece(each.token), each.logprob), "top_logprobs": top} for each, top in zip(tokens, tops, strict=True)]
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """bytes: null where the token holds a part of a character only."""
    return {"token": text, "logprob": shown_logprob(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def shown_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
