"""Turns the body of /v1/responses into that of a chat.  Knows no decoder: the chat's own reader checks what the values hold."""

from __future__ import annotations

import json
import sys
from typing import Any

from specdec.checks import shown
from specdec.serve.responses.history import read_input
from specdec.serve.responses.output import ECHOED, THOUGHTS
from specdec.serve.responses.tools import read_choice, read_tools
from specdec.serve.wire.errors import wrong
from specdec.serve.wire.fields import EXTENSIONS, SAMPLING_FIELDS, SILENT_FIELDS, UNSUPPORTED, only_used
from specdec.serve.wire.left_out import sift

RESPONSES = "/v1/responses"
SILENT = (*SILENT_FIELDS, "client_metadata")  # the last one is Codex' own
HISTORY = "this server keeps no responses; nearest thing that works: send the whole history as input"
# Fields that would need a memory of responses, or a service that is none of this server's.
ELSEWHERE = {
    "previous_response_id": HISTORY,
    "conversation": HISTORY,
    "background": "answers are sent as they are made; nearest setting that works: background=false",
    "prompt": "this server keeps no prompts; nearest thing that works: instructions and input",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (False,) if name == "background" else () for name in ELSEWHERE},
    "truncation": ("disabled",), "max_tool_calls": (), "moderation": (), "context_management": (), "background_options": (),
    "access_programs": (), "image": (),
}  # fmt: skip
# Of the chat's fields, those that mean the same here.
SAME = tuple(
    name
    for name in dict.fromkeys((*SAMPLING_FIELDS, *EXTENSIONS))
    if name not in ("return_origins", "return_trees", "return_token_ids", "prompt_logprobs", "continue_final_message",
                    "add_generation_prompt", "stop")
)  # fmt: skip
USED = (
    "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text", "reasoning",
    "stream", "stream_options", "include", "top_logprobs", "stop", *SAME,
)  # fmt: skip
LOGPROBS = "message.output_text.logprobs"  # what may be included, beside THOUGHTS
# How errors about a chat's fields are to call them.
CALLED = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format.json_schema": "text.format",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort",
}  # fmt: skip


def chat_body(body: dict[str, Any], lenient: bool = False) -> tuple[dict[str, Any], list[str]]:
    """The body of the chat that is asked for, and what was left out of the request's, which only a lenient server does.

    ApiError 400 with the name of the field that is wrong.
    """
    left_out = list[str]()
    _check_echoed(body)
    if not isinstance(kept := body.get("store"), bool | None):  # which does nothing here, but says what was meant
        raise wrong("store", f"store must be true or false, got {shown(kept)}; nearest setting that works: store=false")
    body = {name: value for name, value in body.items() if name not in SILENT}
    for name, why in ELSEWHERE.items():
        if body.get(name) not in (None, False):
            raise wrong(name, f"{name} can't be used: {why}", UNSUPPORTED)
    if lenient:
        body, left_out = sift(body, USED, NEUTRAL)
    values = only_used(body, USED, NEUTRAL, "")
    chat = {name: values[name] for name in ("model", "parallel_tool_calls", "stream", "stop", *SAME) if name in values}
    chat["messages"] = read_input(values.get("input"), values.get("instructions"))
    if (tools := values.get("tools")) is not None:
        chat["tools"] = read_tools(tools)
    if (choice := values.get("tool_choice")) is not None:
        chat["tool_choice"] = read_choice(choice)
    if "max_output_tokens" in values:
        chat["max_tokens"] = values["max_output_tokens"]
    if (form := _text_format(values.get("text"))) is not None:
        chat["response_format"] = form
    if (reasoning := values.get("reasoning")) is not None:
        told = _object("reasoning", reasoning, ("effort", "summary", "generate_summary"))  # a thought is given whole
        if "effort" in told:
            chat["reasoning_effort"] = told["effort"]
    if "stream_options" in values:
        _object("stream_options", values["stream_options"], ("include_obfuscation",))
    if _includes_logprobs(values.get("include")):
        chat |= {"logprobs": True, "top_logprobs": values.get("top_logprobs", 0)}
    elif values.get("top_logprobs"):
        raise wrong("top_logprobs", f"top_logprobs needs include; nearest setting that works: include={[LOGPROBS]}")
    elif values.get("logprobs_mode", "raw") != "raw":
        raise wrong("logprobs_mode", f"logprobs_mode needs include; nearest setting that works: include={[LOGPROBS]}")
    return chat, left_out


def _check_echoed(body: dict[str, Any]) -> None:
    """ApiError 400 for a field that the response repeats and that holds a number such as 1e999, which JSON can't hold again."""
    for name in ECHOED:
        try:
            json.dumps(body.get(name), allow_nan=False)
        except ValueError:
            raise wrong(
                name, f"{name} must hold finite numbers, got {shown(body[name])}; nearest: {sys.float_info.max:g}"
            ) from None


def _object(name: str, value: Any, used: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(name, f"{name} must be an object, got {shown(value)}")
    return only_used(value, used, {}, f"{name}.")


def _text_format(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    form = _object("text", value, ("format", "verbosity")).get("format")
    if form is None or not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    told = only_used(form, ("type", "name", "description", "schema", "strict"), {}, "text.format.")
    return {"type": "json_schema", "json_schema": {key: each for key, each in told.items() if key != "type"}}


def _includes_logprobs(value: Any) -> bool:
    if value is None:
        return False
    known = (LOGPROBS, THOUGHTS)
    if not isinstance(value, list) or any(each not in known for each in value):
        raise wrong("include", f"include must be a list of some of {', '.join(known)}, got {shown(value)}", UNSUPPORTED)
    return LOGPROBS in value
