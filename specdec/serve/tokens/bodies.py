"""The bodies and answers of /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec.chat.tools import read_rules
from specdec.checks import about, field_of, require_bool, require_ids, shown
from specdec.serve.chats.messages import effort_of, read_chat
from specdec.serve.wire.errors import wrong
from specdec.serve.wire.fields import TEMPLATE_FIELDS, TOOL_FIELDS, only_used
from specdec.serve.wire.requests import check_model

TEXT_FIELDS = ("model", "prompt", "add_special_tokens", "return_token_strs")
CHAT_FIELDS = ("model", "messages", "return_token_strs", *TOOL_FIELDS, *TEMPLATE_FIELDS)


class TokenizePlan(NamedTuple):
    """prompt: a text or a chat.  special: whether a text gets the tokens that the tokenizer puts around texts.

    strings: whether the text of each token is wanted.  effort: see RequestPlan.
    """

    prompt: Any
    special: bool
    strings: bool
    effort: str | None = None


def read_tokenize_plan(body: dict[str, Any], model_name: str) -> TokenizePlan:
    """The plan of a body.  ApiError 400 or 404 with the name of the field that is wrong."""
    is_chat = body.get("messages") is not None
    values = only_used(body, CHAT_FIELDS if is_chat else TEXT_FIELDS, {}, "")
    check_model(values.get("model"), model_name)
    try:
        with about("add_special_tokens"):
            special = require_bool("add_special_tokens", values.get("add_special_tokens", True), True)
        with about("return_token_strs"):
            strings = require_bool("return_token_strs", values.get("return_token_strs", False), False)
        if is_chat:
            chat = read_chat(values, read_rules(*map(values.get, TOOL_FIELDS)))
            return TokenizePlan(chat, special, strings, effort_of(values))
    except (TypeError, ValueError) as error:
        raise wrong(field_of(error) or None, str(error)) from None
    prompt = values.get("prompt")
    if not isinstance(prompt, str):
        raise wrong("prompt", f"prompt must be a text, or messages a chat, got {shown(prompt)}")
    return TokenizePlan(prompt, special, strings)


def tokenized(ids: Sequence[int], max_seq_len: int, strings: Sequence[str] | None) -> dict[str, Any]:
    return {"count": len(ids), "max_model_len": max_seq_len, "tokens": list(ids), "token_strs": strings}


def read_detokenize(body: dict[str, Any], model_name: str, vocab_size: int) -> list[int]:
    """The ids of a body, below vocab_size.  ApiError 400 or 404 with the name of the field that is wrong."""
    values = only_used(body, ("model", "tokens"), {}, "")
    check_model(values.get("model"), model_name)
    tokens = values.get("tokens")
    if tokens is None:
        raise wrong("tokens", "tokens is missing: expected a list of token ids; nearest thing that works: []")
    try:
        ids = list(require_ids("tokens", tokens))
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong("tokens", str(error)) from None
    if unknown := [token for token in ids if token >= vocab_size]:
        raise wrong("tokens", f"tokens holds {unknown[0]}; expected ids in [0, {vocab_size - 1}]")
    return ids
