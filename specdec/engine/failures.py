"""Why a request got no token: its grammar, its options for single tokens, or logits that are not finite.

This module knows no tensor and no library of grammars: the request brings a function that says what its grammar allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from specdec.checks import NoTokenLeft
from specdec.engine.request import LeftAfter, Request


def no_token(request: Request, tokens: Sequence[int], is_first: bool) -> Exception:
    """The error of a request whose last launch emitted these tokens and then none.  is_first: whether it was the prompt's."""
    text = [*request.prompt_ids, *request.output.token_ids, *tokens]
    where = f"at position {len(text)}{', the first after the prompt' if is_first else ''}"
    if request.left_after is not None and (fault := _fault(request, request.left_after, text, where)):
        return NoTokenLeft(fault)
    return FloatingPointError(
        f"the target's logits are not finite (NaN or inf) {where}: neither its weights nor its dtype may overflow"
    )


def _fault(request: Request, left_after: LeftAfter, text: Sequence[int], where: str) -> str:
    """What the request asks for that leaves no token after its text; empty if some token is left."""
    grammar, output = request.choice.grammar, text[len(request.prompt_ids) :]
    left, reason = left_after(grammar, output)
    if grammar is not None and not left:
        said = f"; llguidance says: {reason}" if reason else ""
        return f"{grammar.kind} leaves no token {where}: it has no such text, or is too large{said}"
    rules = request.choice.rules
    ends = rules.ends if rules is not None and len(text) < request.choice.options.first_end else ()  # that min_tokens bans
    rest, fewer = [token for token in left if token not in ends], f"min_tokens={len(output)}"
    if not rest:
        what, why = ("stop_token_ids", "") if grammar is None else (grammar.kind, ": the text is complete")
        return f"{what} and min_tokens leave no token {where}{why}; nearest setting that works: {fewer}"
    if _left_by_words(request, rest, text):
        return ""
    without_ends = _left_by_words(request, left, text)  # then a smaller min_tokens helps, too
    names = [*([grammar.kind] if grammar is not None else []), *(["min_tokens"] if without_ends else []), "bad_words"]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    helps = f", or {fewer}" if without_ends else ""
    return f"{listed} leave no token {where}; nearest setting that works: fewer bad_words{helps}"


def _left_by_words(request: Request, left: Sequence[int], text: Sequence[int]) -> list[int]:
    """Those of the tokens that bad_words leave after a text; those of one token are a bias of -inf."""
    if (rules := request.choice.rules) is None:
        return list(left)
    banned = {token for token, added in rules.bias if added == -inf}
    banned |= {word[-1] for word in rules.bad_words if list(text[1 - len(word) :]) == list(word[:-1])}
    return [token for token in left if token not in banned]
