"""Why a request got no token: its grammar, its options for single tokens, or logits that are not finite.

This module knows no tensor and no library of grammars: the request brings a function that says what its grammar allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from specdec.checks import NoTokenLeft
from specdec.engine.request import Request


def no_token(request: Request, tokens: Sequence[int], is_first: bool) -> Exception:
    """The error of a request whose last launch emitted these tokens and then none.  is_first: whether it was the prompt's."""
    text = [*request.prompt_ids, *request.output.token_ids, *tokens]
    grammar, where = request.choice.grammar, f"at position {len(text)}{', the first after the prompt' if is_first else ''}"
    if grammar is not None and request.left_after is not None:
        left, reason = request.left_after(grammar, text[len(request.prompt_ids) :])
        if not left:
            said = f"; llguidance says: {reason}" if reason else ""
            return NoTokenLeft(f"{grammar.kind} leaves no token {where}: it has no such text, or is too large{said}")
        if not (rest := _left_by_ends(request, left, len(text))):
            return NoTokenLeft(
                f"{grammar.kind} and min_tokens leave no token {where}: the text is complete; nearest setting that works: "
                f"min_tokens={len(text) - len(request.prompt_ids)}"
            )
        if not _left_by_words(request, rest, text):
            return NoTokenLeft(
                f"{grammar.kind}, bad_words and logit_bias leave no token {where}; nearest setting that works: "
                "fewer bad_words, and no logit_bias of -inf"
            )
    options = "; or the options for single tokens leave none" if request.choice.rules is not None else ""
    return FloatingPointError(
        f"the target's logits are not finite (NaN or inf) {where}: neither its weights nor its dtype may overflow{options}"
    )


def _left_by_ends(request: Request, left: Sequence[int], position: int) -> list[int]:
    """Those of the tokens that min_tokens leaves."""
    rules = request.choice.rules
    banned = rules.ends if rules is not None and position < request.choice.options.first_end else ()
    return [token for token in left if token not in banned]


def _left_by_words(request: Request, left: Sequence[int], text: Sequence[int]) -> list[int]:
    """Those of the tokens that bad_words and logit_bias leave after a text."""
    if (rules := request.choice.rules) is None:
        return list(left)
    banned = {token for token, added in rules.bias if added == -inf}
    banned |= {word[-1] for word in rules.bad_words if list(text[1 - len(word) :]) == list(word[:-1])}
    return [token for token in left if token not in banned]
